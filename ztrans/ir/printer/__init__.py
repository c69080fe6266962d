"""Print programs: on a screen, as the difference of two, in a notebook.

Every printed line has at most `WIDTH` columns. A pass does not rename values, so two stages of a program print
differently only where a pass changed the program.
"""

from .differences import Traffic, diff, traffic
from .equations import WIDTH, equation, fold, one_line, op_name, wrap
from .notebook import html
from .programs import header, program
from .stages import Printed
from .units import format_bytes, format_seconds
