"""The golden vectors of miles-tito, computed through the public API and compared exactly.

`python -m miles_tito.conformance FILES… [--tokenizers DIR]` prints each failure and a last line `N passed, M failed`.
What is not built counts as failed.
"""

from .cases import Outcome, check_file

__all__ = ["Outcome", "check_file"]
