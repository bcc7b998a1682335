"""What one rank of a run holds between two steps, as plain values and tensors; and how a rank goes on from that."""
