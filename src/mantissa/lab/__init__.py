"""The lab: a grid of runs with paired seeds, gone on with where it was killed, and one page that says what came out."""

from mantissa.lab.page import write_page
from mantissa.lab.plan import Cell, Lab, load_lab
from mantissa.lab.rows import Rows
from mantissa.lab.run import bill, run_lab

__all__ = ["Cell", "Lab", "Rows", "bill", "load_lab", "run_lab", "write_page"]
