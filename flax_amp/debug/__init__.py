"""Diagnostics: what mixed precision does to a program, and why.

`explain` tells which equation of which module runs in which dtype, what decided so, and
what a person has to act on. `find_nonfinite` names the equation that made an inf or a
NaN. `compare_precision` tells how far gradients are from those in float32, and what
helps. `measure` tells what a step takes in each precision. Nothing here is needed for
training, and nothing else in the package imports it. See README.md in this folder.
"""

from flax_amp.debug._compare import Comparison as Comparison
from flax_amp.debug._compare import GradientErrors as GradientErrors
from flax_amp.debug._compare import Setting as Setting
from flax_amp.debug._compare import compare_precision as compare_precision
from flax_amp.debug._explain import Explanation as Explanation
from flax_amp.debug._explain import Problem as Problem
from flax_amp.debug._explain import explain as explain
from flax_amp.debug._measure import Figures as Figures
from flax_amp.debug._measure import Measurement as Measurement
from flax_amp.debug._measure import measure as measure
from flax_amp.debug._nonfinite import NonfiniteReport as NonfiniteReport
from flax_amp.debug._nonfinite import find_nonfinite as find_nonfinite
from flax_amp.debug._record import Dtypes as Dtypes
from flax_amp.debug._record import Equation as Equation
from flax_amp.debug._run import Finding as Finding
