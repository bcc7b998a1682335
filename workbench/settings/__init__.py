"""Knobs with their checks, and families of settings found in their folders. Imports none of our other packages."""

from workbench.settings.changes import NEXT as NEXT
from workbench.settings.changes import Change as Change
from workbench.settings.changes import fold as fold
from workbench.settings.changes import resolved as resolved
from workbench.settings.discovery import KnobError as KnobError
from workbench.settings.discovery import member as member
from workbench.settings.discovery import members as members
from workbench.settings.discovery import renamed as renamed
from workbench.settings.discovery import shipped as shipped
from workbench.settings.discovery import short as short
from workbench.settings.family import Family as Family
from workbench.settings.knobs import Knob as Knob
from workbench.settings.knobs import checked as checked
from workbench.settings.knobs import describe as describe
from workbench.settings.knobs import knob as knob
from workbench.settings.knobs import knobs as knobs
from workbench.settings.knobs import walk as walk
from workbench.settings.named import find as find
from workbench.settings.paths import AND as AND
from workbench.settings.paths import each as each
from workbench.settings.paths import joined as joined
from workbench.settings.paths import resolve as resolve
from workbench.settings.paths import with_value as with_value
from workbench.settings.paths import with_values as with_values
from workbench.settings.plain import Json as Json
from workbench.settings.plain import from_plain as from_plain
from workbench.settings.plain import in_words as in_words
from workbench.settings.plain import normalise as normalise
from workbench.settings.plain import to_plain as to_plain

__all__ = [
    "AND",
    "NEXT",
    "Change",
    "Family",
    "Json",
    "Knob",
    "KnobError",
    "checked",
    "describe",
    "each",
    "find",
    "fold",
    "from_plain",
    "in_words",
    "joined",
    "knob",
    "knobs",
    "member",
    "members",
    "normalise",
    "renamed",
    "resolve",
    "resolved",
    "shipped",
    "short",
    "to_plain",
    "walk",
    "with_value",
    "with_values",
]  # fmt: skip
