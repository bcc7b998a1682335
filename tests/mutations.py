"""The mistakes that `python -m tests.mutants` plants, all typical of a tired programmer.

They are in the newest code: shadows, any-batch rounds, waves, federated clients, gradients by priority, policies,
all-reduce algorithms, sites and the tuner. Add a few lines here for a new method, too. Avoid typing errors that any
test finds. Plant a swapped update, a wrong divisor, or a rank or moment that is nearly right.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """In `file`, under workbench/, `was` becomes `now`; it occurs once.

    tests: the tests that must notice, as pytest's arguments
    why:   the effect of the mistake
    equivalent: why no test can notice, for a mutant that means the same
    """

    name: str
    file: str
    was: str
    now: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""


def named(file: str, *tests: str) -> tuple[str, ...]:
    """Returns some tests of a file."""
    return tuple(f"{file}::{test}" for test in tests) or (file,)


SHADOWS = ("tests/golden/test_shadow.py",)
DABMD = ("tests/golden/test_dabmd.py",)
TEASQ = ("tests/golden/test_teasq_fed.py",)
TEASQ_LIVE = named("tests/unit/test_teasq_fed.py", "test_the_servers_copy_of_a_rank_is_bit_identical",
                   "test_it_is_changed_and_switched_off_live")  # fmt: skip
SWITCHED = ("tests/laws/test_partitions.py", "-k", "ordered and AdamW")
WAVES = ("tests/unit/test_wavelet.py",)
PRIORITIES = ("tests/unit/test_byte_scheduler.py", "-k", "piece or overtake or credit or urgent or order")
SERVERS = ("tests/unit/test_async_server.py", "tests/unit/test_async_server_card.py", "-k",
           "synchronous_server or sums")  # fmt: skip
RULES = ("tests/unit/test_policies.py", "-k", "period or numpy or gain_is or slower or noise or equally_many_looks "
         "or first_asynchronous")  # fmt: skip
STEERED = ("tests/unit/test_policies.py", "-k", "same_losses or sync_switch or user or may_only_set or no_rank_waits "
           "or neither_hangs or seconds_per_step or measuring_the_gain")  # fmt: skip
SUMS = ("tests/unit/test_algorithms.py", "-m", "not ranks")
SITES = ("tests/unit/test_sites.py", "tests/unit/test_between_sites.py", "-k", "not real_ranks")
WATCHED = ("tests/unit/test_tuning_watched.py",)

_STRATEGIES = (
    Mutant("ShadowEASGD: what it looked at moves on", "strategies/shadow_easgd.py",
           "begun = [bucket.like(bucket.data.clone()) for", "begun = [bucket.like(bucket.data) for", SHADOWS,
           "steps made during a round are taken back by the correction"),
    Mutant("ShadowEASGD: the centre answers before it has moved", "strategies/shadow_easgd.py",
           """        self._give_way(state, await taken(rank, who, "shadow", mine))
        await post(""",
           """        came = await taken(rank, who, "shadow", mine)
        await post(""", SHADOWS, "the centre never moves, and what comes back is stale"),
    Mutant("ShadowEASGD: rank 0 meets its centre once too rarely", "strategies/shadow_easgd.py",
           "rounds % (rank.size - 1) == 0", "rounds % rank.size == 0", SHADOWS, "rank 0 counts for less than others"),
    Mutant("ShadowEASGD: servers count as trainers when it is left", "strategies/shadow_easgd.py",
           "self.alpha / self.batches(rank.size)", "self.alpha / rank.size", SHADOWS,
           "the parameters shrink by a part of alpha whenever it is left"),
    Mutant("ShadowEASGD: the centre stays behind when it is left", "strategies/shadow_easgd.py",
           "            centre.copy_(bucket.data)\n", "", SHADOWS, "the next round pulls all ranks back"),
    Mutant("ShadowEASGD: what is evaluated is the rank's own", "strategies/shadow_easgd.py",
           'return [bucket.like(state.memory.flat("centre", bucket)) for bucket in await self.replica(rank)]',
           "return await self.replica(rank)", SHADOWS, "the held-out loss is that of one replica, not of the method"),
    Mutant("shadows: the gap begins where the round ended", "strategies/_shadow.py",
           "self._last = step", "self._last = rank.step", SHADOWS, "the sync gap leaves out the round itself"),
    Mutant("shadows: the gap is counted from the start", "strategies/_shadow.py",
           "        self._last = step\n", "", SHADOWS, "the sync gap grows without end"),
    Mutant("shadows: what was looked at is not a copy", "strategies/_shadow.py",
           "before = bucket.like(bucket.data.clone())", "before = bucket.like(bucket.data)", SHADOWS,
           "steps made during an averaging are lost"),
    Mutant("ShadowBMUF: parameters go to the W of before", "strategies/shadow_bmuf.py",
           """                W.add_(delta)
                bucket.data.add_(W - before.data, alpha=self.alpha)""",
           """                bucket.data.add_(W - before.data, alpha=self.alpha)
                W.add_(delta)""", SHADOWS, "W comes a round late"),
    Mutant("ShadowBMUF: the block's gradient is from the rank's own", "strategies/shadow_bmuf.py",
           "mean.data.sub_(W)", "mean.data.sub_(before.data)", SHADOWS, "ranks keep a W each"),
    Mutant("ShadowBMUF: zeta acts on what is left of delta as well", "strategies/shadow_bmuf.py",
           "delta.mul_(self.eta).add_(mean.data.sub_(W), alpha=self.zeta)",
           "delta.mul_(self.eta * self.zeta).add_(mean.data.sub_(W), alpha=self.zeta)", SHADOWS,
           "the momentum is smaller than the knob says"),
    Mutant("ShadowMA: the mean is kept after it was used up", "strategies/shadow_ma.py",
           """                state.memory.flat("mean", bucket).copy_(mean.data)
                bucket.data.add_(mean.data.sub_(before.data), alpha=self.alpha)""",
           """                bucket.data.add_(mean.data.sub_(before.data), alpha=self.alpha)
                state.memory.flat("mean", bucket).copy_(mean.data)""", SHADOWS,
           "a difference is evaluated in place of a model"),
    Mutant("DABMD: a batch is begun that ends too late", "strategies/dabmd.py",
           "now + lasted <= deadline", "now <= deadline", DABMD, "the round lasts longer than its window"),
    Mutant("DABMD: a batch that ends just in time is left out", "strategies/dabmd.py",
           "self.window * 1e-3 + SLACK_SECONDS", "self.window * 1e-3", DABMD, "rounding takes a batch away"),
    Mutant("DABMD: one batch more than allowed", "strategies/dabmd.py",
           "done < self.most", "done <= self.most", DABMD, "off by one"),
    Mutant("DABMD: weights are not mixed", "strategies/dabmd.py",
           "weight = await _mix(", "await _mix(", DABMD, "from the second mixing on weights are stale"),
    Mutant("DABMD: mixings of two steps share a number", "strategies/dabmd.py",
           "number = rank.step * self.rounds + k", "number = rank.step + k", DABMD,
           "a graph that changes from round to round mixes with the same ranks again"),
    Mutant("DABMD: a neighbour counts as this rank does", "strategies/dabmd.py",
           "share * float(values_of(theirs, weight))", "share * weight", DABMD, "a slow rank counts in full"),
    Mutant("DABMD: the simplex is the bucket", "strategies/dabmd.py",
           """        for part in bucket.parts:
            x, g = bucket.data[part.start : part.stop], grad.data[part.start : part.stop]""",
           """        for _ in bucket.parts[:1]:
            x, g = bucket.data, grad.data""", DABMD, "only a bucket keeps its sum"),
    Mutant("DABMD: zeros are let in", "strategies/dabmd.py",
           "low[worst] > 0:", "low[worst] >= 0:", DABMD, "the logarithm of 0 is taken, and the parameter stays there"),
    Mutant("Wavelet: one batch counts, not two", "strategies/sub_models/wavelet.py",
           "1.0 / (2 * rank.size)", "1.0 / rank.size", WAVES, "twice the gradient"),
    Mutant("Wavelet: tock waits for one piece more", "strategies/sub_models/wavelet.py",
           "fallen >= self.lead", "fallen > self.lead", WAVES, "off by one in when tock begins to rise"),
    Mutant("Wavelet: half of the examples of a step", "strategies/sub_models/wavelet.py",
           "return 2 * size", "return size",
           (*WAVES, "tests/unit/test_large_batch.py", "-k", "alternates or in_proportion"),
           "a rate that is scaled with the global batch is half of what it should be"),
    Mutant("waves: a layer that writes in place is handed the original", "host/passes/piecewise.py",
           'getattr(first, "inplace", False) or not', "not", WAVES, "it overwrites what backward needs"),
    Mutant("waves: a piece's share is of the pieces", "host/passes/piecewise.py",
           "sum(map(estimate_compute, self._list_parts(piece, of))) / sum(map(estimate_compute, self.model_parts))",
           "1.0 / of", WAVES,
           "a pace is kept in equal parts, though pieces are unequal"),
    Mutant("TEASQ-Fed: n is the number of ranks", "strategies/teasq_fed.py",
           "ceil(self.share * n - 1e-9)", "ceil(self.share * n / self.clients - 1e-9)", TEASQ,
           "fewer clients at work than C says"),
    Mutant("TEASQ-Fed: staleness over K, not over what came", "strategies/teasq_fed.py",
           "state.stale / state.cached", "state.stale / self.cache", TEASQ,
           "a cache that is not full when it is left counts for too much"),
    Mutant("TEASQ-Fed: staleness is added up over mixings", "strategies/teasq_fed.py",
           "state.cached, state.weight, state.stale = 0, 0.0, 0.0", "state.cached, state.weight = 0, 0.0", TEASQ,
           "a missing reset: the server moves less and less"),
    Mutant("TEASQ-Fed: an update is added to the present model", "strategies/teasq_fed.py",
           "add_(update.add_(sent), alpha=share)",
           'add_(update.add_(state.memory.flat("model", bucket)), alpha=share)', TEASQ,
           "what a stale client has trained from is forgotten"),
    Mutant("TEASQ-Fed: the server believes all has arrived", "strategies/teasq_fed.py",
           "            sent.add_(opened(codec, message, sent))\n",
           '            sent.copy_(state.memory.flat("model", bucket))\n', (*TEASQ, *TEASQ_LIVE),
           "what the coder leaves out is never sent"),
    Mutant("TEASQ-Fed: the last to ask is served first", "strategies/teasq_fed.py",
           "state.waiting.popleft()", "state.waiting.pop()", TEASQ, "a client may wait for ever"),
    Mutant("TEASQ-Fed: a client's data stay when it is left", "strategies/teasq_fed.py",
           "        await rank.client(0, 1)\n", "", TEASQ_LIVE, "the next strategy sees one client's data"),
    Mutant("ByteScheduler: the last layers have no priority", "strategies/byte_scheduler.py",
           "bucket.index + 1 if", "bucket.index if", PRIORITIES,
           "bucket 0 is overtaken by none: the least urgent goes first"),
    Mutant("ByteScheduler: pieces are larger than delta", "strategies/byte_scheduler.py",
           "-(-bucket.nbytes // int(self.partition_mb * 1e6))", "bucket.nbytes // int(self.partition_mb * 1e6)",
           PRIORITIES, "rounded down in place of up"),
    Mutant("ByteScheduler: credit counts buckets", "strategies/byte_scheduler.py",
           "share=piece.nbytes /", "share=bucket.nbytes /", PRIORITIES,
           "one piece uses up a credit that has room for several"),
    Mutant("ByteScheduler: updated before its pieces have come", "strategies/byte_scheduler.py",
           """            for handle in state.pop(bucket.index):
                await rank.wait(handle)
            await rank.update(bucket)""",
           """            await rank.update(bucket)
            for handle in state.pop(bucket.index):
                await rank.wait(handle)""", PRIORITIES, "ranks step by gradients of their own"),
    Mutant("turns: just as much as a credit is not enough", "engine/collectives/child_order.py",
           "if share >= 1.0:", "if share > 1.0:", PRIORITIES, "one more than fits is chosen"),
    Mutant("turns: who waits for its turn is passed", "engine/collectives/child_order.py",
           """            if not job.priority:
                break""",
           """            if not job.priority:
                continue""", PRIORITIES, "urgent children overtake one without a priority"),
    Mutant("SyncServer: it answers when one is missing", "strategies/async_server.py",
           "len(waiting) < trainers", "len(waiting) < trainers - 1", SERVERS, "the slowest is not waited for"),
    Mutant("SyncServer: news takes two steps, whatever the periods", "strategies/sync_server.py",
           "min(self.push, self.fetch) + 1", "2", SERVERS,
           "a rank has gone past the step at which it hears of a change"),
    Mutant("SyncServer: news takes a step less", "strategies/sync_server.py",
           "min(self.push, self.fetch) + 1", "min(self.push, self.fetch)", SERVERS,
           "a rank has gone past the step at which it hears of a change",
           equivalent="the answer that lets ranks go on brings the news along; a step more is caution"),
)  # fmt: skip

_POLICIES = (
    Mutant("AdaComm: the root is of the present period", "policies/ada_comm.py",
           "* state.every)", "* now)", RULES, "tau in place of tau_0: it falls ever faster"),
    Mutant("AdaComm: a period that stays counts as lowered", "policies/ada_comm.py",
           "if wanted < now:", "if wanted <= now:", RULES, "where the loss stands still the period does, too"),
    Mutant("GraVAC: a second miss forgets the first", "policies/gravac.py",
           "state.bar, state.before = max(state.bar, state.before), 0.0", "state.bar, state.before = state.before, 0.0",
           RULES, "the density goes to and fro after all"),
    Mutant("GraVAC: norms, not their squares", "compressors/_gain.py",
           "float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2",
           "float(torch.linalg.vector_norm(x, dtype=torch.float64))", RULES, "the gain is taken for larger"),
    Mutant("GraVAC: what was owed is not sent's share", "compressors/_gain.py",
           "            x += _left(memory, bucket, x)\n", "            pass\n", RULES,
           "more can be sent than there is"),
    Mutant("GraVAC: the compressor is not put back", "host/observe/compression_error.py",
           "        rank.compressor = of\n", "        pass\n", STEERED, "each step weighs once more than the last"),
    Mutant("SyncSwitch: a product that is rounded up", "policies/sync_switch.py",
           "* experiment.steps - ROUNDING)", "* experiment.steps)", RULES,
           "0.07 of 100 steps are 8, for the product is a little above 7"),
    Mutant("SyncSwitch: spread of a sample", "policies/sync_switch.py",
           "mean, spread = fmean(rates.values()), pstdev(rates.values())",
           "mean = fmean(rates.values())\n    spread = pstdev(rates.values()) * (len(rates) / (len(rates) - 1)) ** 0.5",
           RULES, "a wrong denominator: of few ranks none is ever slow enough"),
    Mutant("SyncSwitch: looks in a row are added up", "policies/sync_switch.py",
           "max(before, 0) + 1 if", "before + 1 if", RULES,
           "who was quick for long has to be slow as long before anybody notices"),
    Mutant("SyncSwitch: a look more until it is no straggler", "policies/sync_switch.py",
           "-looks >= self.windows", "-looks > self.windows", RULES, "off by one on the way back"),
    Mutant("SyncSwitch: the rate is a share of the present one", "policies/sync_switch.py",
           "state.lr * share", "e.lr * share", STEERED, "it never comes back to the usual one"),
    Mutant("steering: a person's change of the same step comes too late", "host/core/change_queue.py",
           "bisect_right([change.at_step for change in self.planned], event.at_step)",
           "sum(change.at_step < event.at_step for change in self.planned)", STEERED,
           "a policy decides by what is no longer so"),
    Mutant("steering: means are since the start", "host/reconfigure/policy_runner.py",
           """        self._drop_values()
        made = tuple(self.made)""", "        made = tuple(self.made)", STEERED, "a missing reset"),
    Mutant("steering: seconds of a pass, not of a step", "host/reconfigure/policy_runner.py",
           'self.steps if name == "compute" else len(noted)', "len(noted)", STEERED, "a wrong denominator"),
    Mutant("steering: only the same path is a person's", "host/reconfigure/policy_runner.py",
           "if any(_has_overlap(path, one) for one in given)", "if path in given", STEERED,
           "a policy that sets the strategy undoes what a person has set in it"),
    Mutant("steering: it looks again before the same step", "host/reconfigure/policy_runner.py",
           "return max(at, after + 1)", "return max(at, after)", STEERED, "off by one: it never comes to an end"),
)  # fmt: skip

_FABRIC = (
    Mutant(
        "HalvingDoubling: one rank too many is too many",
        "fabric/algorithms/halving_doubling.py",
        """        if rank.index < 2 * extra:
            await rank.add(""",
        """        if rank.index <= 2 * extra:
            await rank.add(""",
        SUMS,
        "off by one: a rank waits for a neighbour that stays",
    ),
    Mutant(
        "HalvingDoubling: bytes of the round before",
        "fabric/algorithms/halving_doubling.py",
        """            n /= 2
            total += max(2 * _message(fabric, pair, n) for pair in pairs) + n * gamma""",
        """            total += max(2 * _message(fabric, pair, n) for pair in pairs) + n * gamma
            n /= 2""",
        SUMS,
        "twice the bytes are priced",
    ),
    Mutant(
        "DoubleTree: pieces are of the whole",
        "fabric/algorithms/double_tree.py",
        "/ more * nbytes / 2 * beta / alpha",
        "/ more * nbytes * beta / alpha",
        SUMS,
        "more pieces than are quickest, for each tree carries half",
    ),
    Mutant(
        "Auto: adding up costs nothing",
        "fabric/algorithms/auto.py",
        "auto.gamma * 1e-9)",
        "0.0)",
        SUMS,
        "a dropped term where adding is dear",
    ),
    Mutant(
        "Auto: only what was measured in full counts",
        "fabric/algorithms/auto.py",
        "if self.latency or self.bandwidth else",
        "if self.latency and self.bandwidth else",
        SUMS,
        "a measured bandwidth alone is passed over",
    ),
    Mutant(
        "ByGroup: any group that has the dimension",
        "fabric/algorithms/by_group.py",
        "group.dims == (self.group,)",
        "self.group in group.dims",
        (*SUMS, "-k", "group or formula"),
        "groups over several dimensions sum by the wrong algorithm",
    ),
    Mutant(
        "TwoLevel: what is ready last goes first",
        "fabric/algorithms/two_level.py",
        "i - lowest if i else None), children",
        "i - lowest if i else None), children[::-1]",
        SUMS,
        "children are waited for in the wrong order",
    ),
    Mutant(
        "TwoLevel: the smallest site is the slowest",
        "fabric/algorithms/two_level.py",
        "total = max((g - 1)",
        "total = min((g - 1)",
        SUMS,
        "where sites are unequal too short a time is predicted",
    ),
    Mutant(
        "all-reduce: a port that all share is each one's own",
        "fabric/algorithms/_base.py",
        "len(ranks) if fabric.shared else 1",
        "1",
        SUMS,
        "on a bus too short a time is predicted",
    ),
    Mutant(
        "all-reduce: a group's mean is over all ranks",
        "host/core/all_reduce.py",
        "and not divides_first(op):\n        flat /= len(ranks)",
        "and not divides_first(op):\n        flat /= rank.size",
        (*SUMS, "-k", "mean_in_a_group"),
        "parameters shrink at each averaging inside a group",
    ),
    Mutant(
        "sites: a collective is where its first two ranks are",
        "fabric/fabric.py",
        "ranks[-1] // self.site",
        "ranks[1] // self.site",
        SITES,
        "the slow link is overlooked",
    ),
    Mutant(
        "sites: of two latencies the smaller",
        "fabric/fabric.py",
        "max(self.link.latency, self.between_latency)",
        "min(self.link.latency, self.between_latency)",
        SITES,
        "the slower of two is what is waited for",
    ),
    Mutant(
        "BetweenSites: a site's residual is one rank's whole",
        "compressors/between_sites.py",
        "mine + (own - total)",
        "own",
        SITES,
        "what others of the site have sent is owed once more",
    ),
    Mutant(
        "BetweenSites: the leader's own is the site's",
        "compressors/between_sites.py",
        """        mine = bucket.data.clone() if leaders is not None else None
        if inside.size > 1:
            await inside.all_reduce(bucket.data, "sum", bucket.name)
""",
        """        if inside.size > 1:
            await inside.all_reduce(bucket.data, "sum", bucket.name)
        mine = bucket.data.clone() if leaders is not None else None
""",
        SITES,
        "a clone that is taken too late",
    ),
    Mutant(
        "tuner: a loss that may be worse is used",
        "sim/tune/trial_runner.py",
        "fit=is_usable(loss is None, loss, a.worse)",
        "fit=True",
        WATCHED,
        "a setting whose loss lies above its trend is the best",
    ),
    Mutant(
        "tuner: trials of fewer ranks are compared",
        "sim/tune/live_search.py",
        "(trial for trial in self.trials if trial.ranks == now)",
        "iter(self.trials)",
        WATCHED,
        "a trial of four ranks is the best of three",
    ),
    Mutant(
        "tuner: what was set before does not come back",
        "sim/tune/live_search.py",
        "self._ranks.restore_settings(self._former)",
        "pass",
        WATCHED,
        "a search that breaks off leaves a trial's values",
    ),
    Mutant(
        "switch: moments begin anew on other ranks",
        "host/transfer/repartition.py",
        "{name: given[name] for name in what.slots if name in given}",
        "{name: given[name] * (given[name].numel() < 2) for name in what.slots if name in given}",
        SWITCHED,
        "what has come is thrown away, on all ranks alike",
    ),
    Mutant(
        "switch: nobody asks whether all of it came",
        "host/transfer/repartition.py",
        "if (before - after) & SUM_MASK:",
        "if False:",
        ("tests/laws/test_partitions.py", "-k", "corrupted"),
        "a sum that is taken and not looked at",
    ),
    Mutant(
        "clicks: the entropy of half a coin",
        "tasks/_clicks.py",
        "return -p * math.log(p) - (1 - p) * math.log(1 - p)",
        "return -p * math.log(p)",
        ("tests/unit/test_click_through.py", "-k", "normalised"),
        "a dropped term",
    ),
)

CHECKPOINTS = ("tests/unit/test_checkpoint_damage.py",)
RECORDS = ("tests/unit/test_record_damage.py",)
USED = ("tests/unit/test_usage.py", "-m", "ranks or not ranks")
GROWS = ("tests/unit/test_growth.py",)
REFUSED = ("tests/unit/test_refused_input.py", "-m", "ranks or not ranks")
HUNG = ("tests/unit/test_silence.py",)
LATE = ("tests/unit/test_lateness.py", "tests/unit/test_waited_for.py")

_FAULTS = (  # mistakes that existed before outside faults were handled
    Mutant("checkpoint: nobody compares the manifest's checksum", "record/checkpoints.py",
           """if seal and hashlib.sha256(b"{" + text[seal.end() :]).hexdigest().encode() != seal[1]:""", "if False:",
           CHECKPOINTS, "one changed digit loads other tensors"),
    Mutant("checkpoint: a manifest without a checksum is read", "record/checkpoints.py",
           """if said["schema"] > 1 and not seal else None""", "if False else None", CHECKPOINTS,
           "who takes the checksum away can change the rest"),
    Mutant("checkpoint: nobody compares a file's digest", "record/checkpoints.py",
           """if digest.hexdigest() != said["sha256"]:""", "if False:", CHECKPOINTS, "damaged tensors are loaded"),
    Mutant("record: nobody compares a batch's checksum", "record/checksums.py", "if said != written(found)[NAME]:",
           "if False:", RECORDS, "a flipped bit gives other rows"),
    Mutant("record: a batch's checksum does not go on from the one before", "record/checksums.py",
           """found = crc32(batch.num_rows.to_bytes(8, "little"), before)""",
           """found = crc32(batch.num_rows.to_bytes(8, "little"), 0)""", RECORDS, "a batch may be left out"),
    Mutant("record: a batch that lost its checksum is read", "record/checksums.py",
           "if said is None and not required:", "if said is None:", RECORDS, "damage that takes the metadata along"),
    Mutant("usage: no rank sees a raised hand", "engine/control/unused_flags.py",
           "return any(low <= self._flags[rank] <= high for rank in ranks)", "return False", USED,
           "a parameter that no rank used moves"),
    Mutant("usage: a hand stays raised", "engine/control/unused_flags.py",
           "return any(low <= self._flags[rank] <= high for rank in ranks)",
           "return any(0 < self._flags[rank] for rank in ranks)", USED, "each later step costs a round trip"),
    Mutant("usage: a hand for a later bucket counts", "engine/control/unused_flags.py",
           "return any(low <= self._flags[rank] <= high for rank in ranks)",
           "return any(self._flags[rank] >> _BUCKET_BITS == step + 1 for rank in ranks)", USED,
           "ranks of an update by bucket decide differently, and hang"),
    Mutant("usage: what one rank unfroze gets the mean", "host/sharding/parameter_usage.py",
           'how = "sum" if host.module is host.model else "mean"', 'how = "mean"', USED,
           "its gradient is too small by the number of ranks"),
    Mutant("growth: what slows down is a leak, too", "engine/record/leak_detector.py",
           "if rises[-3:].sum() < MIN_LATE_SHARE * rises[:3].sum():", "if False:", GROWS,
           "a cache that fills gives an alarm"),
    Mutant("growth: any growth is a leak", "engine/record/leak_detector.py", "grown < MIN_GROWTH_MB", "False", GROWS,
           "a few MB give an alarm"),
    Mutant("growth: the newest readings are not looked at alone", "engine/record/leak_detector.py",
           " or find_growth(steps[half:], mb[half:])", "", GROWS, "a leak that begins late is not told"),
    Mutant("growth: it is told again and again", "engine/record/leak_detector.py", "self._has_reported = True", "pass",
           GROWS, "one note becomes many"),
    Mutant("hang: who waits in the script's collective is blamed", "cluster/observe/hang_diagnosis.py",
           "if (past := _went_past(table)) is not None:", "if (past := None) is not None:", HUNG,
           "the rank that skipped it is not named"),
    Mutant("lateness: waits count as a rank's own time", "analysis/communication/lateness.py",
           """w.cover(rank, "codec", "wait", *OUTSIDE)""", """w.cover(rank, "codec", *OUTSIDE)""", LATE,
           "who waits is late"),
    Mutant("norm: a complex gradient counts with its real part", "rank/dtypes.py", "return torch.view_as_real(x)",
           "return x.real", ("tests/laws/test_element_types.py", "-m", "ranks or not ranks", "-k",
                             "norm_of_a_complex"), "clipping lets long gradients through"),
    Mutant("optimizers: one that asks for a closure is taken", "experiment/closure_rules.py", "if e.task.has_own_loop:",
           "if True:", REFUSED, "LBFGS raises a bare TypeError"),
    Mutant("empty batch: nobody looks whether it has rows", "host/observe/non_finite.py", "if has_no_rows(batch):",
           "if False:", REFUSED, "the advice is to lower the learning rate"),
)  # fmt: skip

MUTANTS = _STRATEGIES + _POLICIES + _FABRIC + _FAULTS
