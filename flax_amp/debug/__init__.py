"""Diagnostics: how mixed precision changes a program, and why.

Training needs no part of this folder. See README.md in this folder.
"""

from flax_amp.debug._compare_precision import Comparison as Comparison
from flax_amp.debug._compare_precision import GradientErrors as GradientErrors
from flax_amp.debug._compare_precision import Sensitivity as Sensitivity
from flax_amp.debug._compare_precision import Setting as Setting
from flax_amp.debug._compare_precision import compare_precision as compare_precision
from flax_amp.debug._compare_training import TrainedPrecision as TrainedPrecision
from flax_amp.debug._compare_training import TrainingComparison as TrainingComparison
from flax_amp.debug._compare_training import compare_training as compare_training
from flax_amp.debug._explain import Explanation as Explanation
from flax_amp.debug._explain import Problem as Problem
from flax_amp.debug._explain import explain as explain
from flax_amp.debug._gap import Gap as Gap
from flax_amp.debug._measure import Figures as Figures
from flax_amp.debug._measure import Measurement as Measurement
from flax_amp.debug._measure import measure as measure
from flax_amp.debug._nonfinite import NonfiniteReport as NonfiniteReport
from flax_amp.debug._nonfinite import find_nonfinite as find_nonfinite
from flax_amp.debug._parameters import Parameter as Parameter
from flax_amp.debug._record import Dtypes as Dtypes
from flax_amp.debug._record import Equation as Equation
from flax_amp.debug._run import Finding as Finding
