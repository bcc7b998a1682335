"""The former name of `workbench.entrypoints`, for `from workbench.doors.laws import laws`. It ends with version 0.3."""

import sys
import warnings

from workbench.entrypoints import laws

warnings.warn("workbench.doors is called workbench.entrypoints since version 0.2; the old name ends with 0.3",
              DeprecationWarning, stacklevel=2)  # fmt: skip
sys.modules["workbench.doors.laws"] = laws  # Python finds it there after it has imported this module
