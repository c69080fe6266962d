"""Programs as text: for a screen, for a comparison, for a notebook.

Every printed line has at most `WIDTH` columns. The names of values are stable across passes, so two stages of a
program differ only where a pass changed it.
"""

from .differences import Traffic, diff, traffic
from .equations import WIDTH, equation, fold, op_name, wrap
from .notebook import html
from .programs import header, program
from .stages import Printed
from .units import format_bytes, format_seconds
