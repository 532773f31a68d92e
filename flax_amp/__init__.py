"""Automatic mixed precision for Flax training loops.

`amp` rewrites a float32 function. The rewritten function computes in float16 or
bfloat16 where half precision is safe. A dynamic loss scaler guards the gradients.
`make_train_step` turns a loss into a jitted step over an `AmpTrainState`, which Orbax
saves and restores.
"""

import importlib
import typing

from flax_amp import optim as optim
from flax_amp._rewriter.half_params import half_params as half_params
from flax_amp._rewriter.policy_warnings import PolicyWarning as PolicyWarning
from flax_amp._rewriter.transform import amp as amp
from flax_amp._rewriter.transform import amp_stop as amp_stop
from flax_amp._training.nnx_step import make_nnx_train_step as make_nnx_train_step
from flax_amp._training.optimizer import AmpOptimizer as AmpOptimizer
from flax_amp._training.progress import StuckError as StuckError
from flax_amp._training.progress import check_progress as check_progress
from flax_amp._training.scaled_grad import dynamic_scale_grad as dynamic_scale_grad
from flax_amp._training.scaled_grad import (
    dynamic_scale_value_and_grad as dynamic_scale_value_and_grad,
)
from flax_amp._training.scaler import DynamicScalerState as DynamicScalerState
from flax_amp._training.scaler import init_scaler as init_scaler
from flax_amp._training.scaler import no_scaler as no_scaler
from flax_amp._training.scaler import scale_loss as scale_loss
from flax_amp._training.scaler import static_scaler as static_scaler
from flax_amp._training.scaler import unscale_grads as unscale_grads
from flax_amp._training.scaler import update_scaler as update_scaler
from flax_amp._training.train_state import AmpTrainState as AmpTrainState
from flax_amp._training.train_step import make_eval_step as make_eval_step
from flax_amp._training.train_step import make_train_step as make_train_step
from flax_amp._tree import all_finite as all_finite
from flax_amp.policy import Precision as Precision
from flax_amp.policy import default_amp_policy as default_amp_policy
from flax_amp.policy import graph_policy as graph_policy
from flax_amp.policy import jaxamp_policy as jaxamp_policy
from flax_amp.policy import use_compute_precision as use_compute_precision
from flax_amp.policy import (
    use_compute_precision_behind_matmuls as use_compute_precision_behind_matmuls,
)
from flax_amp.policy import use_float32_result as use_float32_result
from flax_amp.policy import use_fp8 as use_fp8
from flax_amp.policy import use_original_precision as use_original_precision

__version__ = "1.0.0rc1"

__all__ = """
AmpOptimizer AmpTrainState DynamicScalerState PolicyWarning Precision StuckError
all_finite amp amp_stop check_progress checkpoint compare_precision debug
default_amp_policy dynamic_scale_grad dynamic_scale_value_and_grad explain
find_nonfinite graph_policy half_params init_scaler jaxamp_policy make_eval_step
make_nnx_train_step make_train_step metrics no_scaler optim scale_loss
static_scaler unscale_grads update_scaler use_compute_precision
use_compute_precision_behind_matmuls use_float32_result use_fp8 use_original_precision
""".split()


# These subpackages are imported at the first use, because a training step needs none of
# them, and Orbax alone takes about as long to import as JAX.
_SUBPACKAGES = ("checkpoint", "debug", "metrics")
_OF_DEBUG = ("compare_precision", "explain", "find_nonfinite")

# A type checker does not see `__getattr__`, and so reports names that do not exist.
if typing.TYPE_CHECKING:
    from flax_amp import checkpoint as checkpoint
    from flax_amp import debug as debug
    from flax_amp import metrics as metrics
    from flax_amp.debug import compare_precision as compare_precision
    from flax_amp.debug import explain as explain
    from flax_amp.debug import find_nonfinite as find_nonfinite
else:

    def __getattr__(name):
        """Imports a subpackage, or a function of `debug`, at the first use."""
        if name in _SUBPACKAGES:
            return importlib.import_module(f"flax_amp.{name}")
        if name in _OF_DEBUG:
            return getattr(importlib.import_module("flax_amp.debug"), name)
        raise AttributeError(f"module 'flax_amp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
