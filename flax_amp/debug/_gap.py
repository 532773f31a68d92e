"""The gap between runs in a precision and runs in float32, and the test of its size.

A run with the seed `i` ends at `F[i]` in float32 and at `P[i]` in the precision, from
the same parameters and on the same batches. The gaps `P[i] - F[i]` are tested.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import optimize, special, stats

POWER = 0.9  # the probability with which a gap of the size `detectable` is found
# The confidence of two t tests, each of which asks for gaps above 0 only: a test of the
# paired gaps, and a test against float32's own spread. Together the tests call less
# than 2 % of the precisions that change nothing outside.
_PAIRED = 0.985
_SPREAD = 0.995
# Losses that differ by less have been added up in another order: 8 times the spacing of
# float32 numbers, relative.
_ROUNDOFF = 2.0**-20
# Quantiles of the estimated noise, for the power. With 250 or 1,000 quantiles, the gap
# `detectable` of three examples changes by less than 3e-5 of itself.
_DRAWS = 500


@dataclasses.dataclass(frozen=True)
class Gap:
    """How far a precision ends from float32, and whether that is too far."""

    gaps: tuple[float, ...]  #: end minus float32's end, for each seed
    mean: float  #: of the gaps; above 0, the precision ends worse
    margin: float  #: the mean gap that is allowed even without noise
    limit: float  #: the largest mean gap that is called inside
    detectable: float  #: a true gap of this size is called outside in 90 % of cases
    is_inside: bool  #: whether the precision ends where float32 ends, or better


def judge(
    reference: Sequence[float],
    untrained: Sequence[float],
    ends: Sequence[float],
    tolerance: float = 0.0,
) -> Gap:
    """Tests whether the mean gap is larger than the gaps of noise and of another seed.

    A precision is outside if its mean gap is above the margin, a size, and above the
    noise by at least one of two one-sided t tests. The mean gap is then above the
    smaller of two limits:

        max(margin, t * deviation of the gaps / sqrt(seeds))          t at 98.5 %
        max(margin, t * sqrt(2) * spread of the ends / sqrt(seeds))   t at 99.5 %

    The margin is float32's own spread over the seeds, a standard deviation. Without the
    margin, a gap in the fourth digit that all seeds share would be outside. Without the
    noise, 17 % of the precisions that change nothing would be outside, with 3 seeds.

    The first test sees small gaps that the seeds share, however far from each other
    the seeds end. The second test also sees faults that make the gaps vary: a loss
    that ends at 13 instead of 0.5 had gaps of 18, 16 and 5, which the first test alone
    calls noise. The ends of a precision that changes nothing are distributed as the
    ends of float32, and their gaps vary by at most sqrt(2) times the spread of the
    ends.

    In float32 against float32 with different seeds, which is the worst case, 1.8 % are
    outside with 2 and with 3 seeds, 1.7 % with 5, 1.3 % with 10. The more two runs of
    the same seed agree in their ends, the fewer precisions are outside.

    Seeds may begin at losses that differ far more than training changes the losses:
    with a learning rate of 1e-6 a run ends where the run began. So the margin of the
    first test is the smaller of two spreads: the spread of the ends, and the spread of
    the gains of the runs since their beginning.

    Args:
      reference: the ends in float32, a finite number for each seed.
      untrained: the same measure before training, for each seed.
      ends: the ends in the precision, for each seed; a smaller end is better.
      tolerance: the least margin, in the unit of the ends.

    Example:
      >>> float32, untrained = [1.0, 1.1, 0.9], [2.3, 2.4, 2.2]
      >>> judge(float32, untrained, [1.01, 1.1, 0.92]).is_inside
      True
      >>> judge(float32, untrained, [1.21, 1.3, 1.11]).is_inside
      False
    """
    spread = statistics.stdev(reference)
    gains = [x - y for x, y in zip(untrained, reference, strict=True)]
    least = max(tolerance, _ROUNDOFF * max(map(abs, reference)))
    margin = max(spread, least)
    paired_margin = margin
    if all(map(math.isfinite, gains)):
        paired_margin = max(min(spread, statistics.stdev(gains)), least)
    gaps = tuple(x - y for x, y in zip(ends, reference, strict=True))
    if not all(map(math.isfinite, gaps)):
        return Gap(gaps, math.inf, paired_margin, paired_margin, math.inf, False)
    mean = statistics.fmean(gaps)
    freedom = len(gaps) - 1
    noise = statistics.stdev(gaps) / math.sqrt(len(gaps))
    tests = (
        (paired_margin, noise, _PAIRED),
        (margin, math.sqrt(2 / len(gaps)) * spread, _SPREAD),
    )
    limits = []
    detectable = []
    for size, error, confidence in tests:
        critical = _critical(confidence, freedom)
        limits.append(max(size, critical * error))
        # The gaps may vary more than the spread of the ends in float32 tells.
        error_of_mean = max(error, noise)
        detectable.append(_detectable(size, critical * error, error_of_mean, freedom))
    limit = min(limits)
    return Gap(gaps, mean, paired_margin, limit, min(detectable), mean <= limit)


@functools.cache
def _critical(confidence: float, freedom: int) -> float:
    return float(stats.t.ppf(confidence, freedom))


def _detectable(size: float, noise: float, error: float, freedom: int) -> float:
    """Returns the true gap that is above a limit with a probability of `POWER`.

    The measured mean has the standard error `error`. The limit is the larger of two
    numbers: `size`, and `noise` as a few seeds estimate the noise.
    """
    if error == 0:
        return size
    limits = np.maximum(size, noise * _estimates(freedom))

    def missing(gap: float) -> float:
        return float(special.ndtr((gap - limits) / error).mean()) - POWER

    # A gap 9 standard errors above all limits is found with certainty, so that the root
    # lies below it.
    return float(optimize.brentq(missing, 0.0, limits.max() + 9 * error))


@functools.cache
def _estimates(freedom: int) -> np.ndarray:
    """Returns estimates of a deviation of 1 from a few seeds, all equally likely."""
    shares = (np.arange(_DRAWS) + 0.5) / _DRAWS
    return np.asarray(np.sqrt(stats.chi2.ppf(shares, freedom) / freedom))
