"""Solves many L1-regularised logistic regressions of one readout site at once: all heads, folds and
values of C.

Each problem is the paper's probe (App. probe-training), in liblinear's form:

    minimise   sum_i s_i log(1 + exp(-y_i (w . z_i + b))) + (|w|_1 + |b| / 100) / C

on rows standardised by the training statistics of the partition (Eq. standardize).  s_i are the
class weights, 0 for rows outside the partition's training side.  Standardisation is folded into the
weights, so all problems share the rows.

The method is accelerated proximal Newton with one curvature, H = Z' S Z / 4, an upper bound of the
logistic loss's.  So a step needs no line search, and the whole path of C shares H.  ``descend``
solves the inner problem.  A problem stops at a relative duality gap of ``GAP``, so its objective is
that close to the optimum for any data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

Floats = NDArray[np.float64]
Tensor = torch.Tensor

# relative to the objective; the returned weights are one step further, in practice within 1e-7
GAP = 1e-4
INTERCEPT_PENALTY = (
    0.01  # a weight has 1: the intercept is practically free, and the dual stays bounded
)
MAX_STEPS = 3000  # separable rows at a large C take hundreds
CHECK_EVERY = 2  # steps between evaluations of the duality gap, which cost half a step
SWEEPS, DECREASE = 300, 1e-3  # an inner problem stopped too early makes the acceleration diverge
# distinct columns of the weights; with more, each partition's product is computed separately
MAX_KINDS = 512
MARGIN = 1e-5  # the curvature is summed in float32 and must stay an upper bound
MIN_VARIANCE = (
    1e-6  # a variance below this share of the second moment has no digits left in float32
)
TINY = 1e-30  # a positive float32 with a finite logarithm
CONSTANT = 1e-9  # a column's deviation below this share of its mean is rounding error


class _Scaled(NamedTuple):
    """Rows around their common centre, and each partition's standardisation and curvature there."""

    rows: Tensor  # [h, n, d + 1] float32: -y_i (x_i, 1), so that a product is minus a margin
    weight: Tensor  # [F, n] float32, in the order of ``rows``
    centre: Tensor  # [h, 1, d] float64, raw units
    mean: Tensor  # [h, F, d] float64, of the centred rows
    inverse: Tensor  # [h, F, d] 1 / std, 0 for constant columns
    metric: Tensor  # [h, F, d + 1, d + 1] float32


def solve(
    rows: NDArray[np.float32],
    label: NDArray[np.integer],
    weight: Floats,
    partition: NDArray[np.integer],
    c: Floats,
) -> tuple[Floats, Floats]:
    """Return raw-space weights [h, P, d] and intercepts [h, P] of P probes on each of h heads.

    rows [h, n, d], label [n] (1 factual), weight [F, n]: s_i of each partition, partition [P], c
    [P]."""
    if not rows.flags.writeable:
        rows = rows.copy()  # torch warns about read-only arrays
    sign = torch.from_numpy(np.where(np.asarray(label) == 1, 1.0, -1.0)).float()
    weights = torch.from_numpy(np.ascontiguousarray(weight, np.float64))
    parts = torch.from_numpy(np.asarray(partition, np.int64))
    strength = torch.from_numpy(np.asarray(c, np.float64))
    heads = torch.split(
        torch.from_numpy(rows), 1
    )  # one by one, so that one head's rows stay in the cache
    solved = [_solve(_scale(head, sign, weights), parts, strength) for head in heads]
    directions, intercepts = zip(*solved, strict=True)
    return np.concatenate(directions), np.concatenate(intercepts)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread, so that sums have the same order for any number of cores; restore
    the setting after."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_numpy_thread() -> AbstractContextManager[Any]:
    """Run numpy, scipy and scikit-learn on one thread, so that sums have the same order for any
    number of cores; restore the setting after."""
    limit: AbstractContextManager[Any] = _thread_pools().limit(limits=1)
    return limit


@cache
def _thread_pools() -> ThreadpoolController:
    """The thread pools of the loaded libraries.

    Looking for them reads the process's whole memory map, 10 ms beside a fit of as much, and the
    libraries are loaded with the modules that fit."""
    return ThreadpoolController()


def _scale(rows: Tensor, sign: Tensor, weight: Tensor) -> _Scaled:
    used = weight.amax(0) > 0
    # Sort the rows so that those with the same weights in every partition (a fold's rows of one
    # class) stand together.
    kinds, kind = _kinds(weight)
    order = torch.argsort(kind, stable=True)
    few = kinds.shape[1] <= MAX_KINDS
    centre = rows[:, used].mean(1, keepdim=True, dtype=torch.float64).float()
    signed = torch.empty(*rows.shape[:2], rows.shape[2] + 1)
    torch.sub(rows[:, order], centre, out=signed[..., :-1])
    signed[..., -1] = 1.0
    signed *= -sign[order][None, :, None]
    # Second moments of (x, 1); the signs cancel in every product.
    if few:
        runs = torch.split(signed, torch.bincount(kind).tolist(), 1)
        gram = torch.stack(
            [(run.transpose(1, 2) @ run).flatten(1) for run in runs], 1
        ).double()  # [h, A, (d + 1)^2]
        plain, weighted = (kinds > 0).double() @ gram, kinds @ gram
    else:
        plain = _moments(signed, (weight > 0).double()[:, order])
        weighted = _moments(signed, weight[:, order])
    size = signed.shape[-1]
    plain, weighted = (moment.view(*moment.shape[:-1], size, size) for moment in (plain, weighted))
    mean = plain[..., :-1, -1] / plain[..., -1:, -1]  # [h, F, d]
    second = plain.diagonal(dim1=2, dim2=3)[..., :-1] / plain[..., -1:, -1]
    variance = (second - mean**2).clamp_min(0.0)
    deviation = variance.sqrt()
    constant = deviation <= CONSTANT * (mean + centre).abs()
    # The difference above is only rounding error if a partition's spread is far below its distance
    # from the centre.
    constant |= variance <= MIN_VARIANCE * second
    inverse = torch.where(constant, 0.0, 1.0 / torch.where(constant, 1.0, deviation))
    # Z' S Z from the moments of (x, 1): z = (x - mean) inverse is an affine map of (x, 1).
    total, first = weighted[..., -1:, -1:], weighted[..., :-1, -1:]
    inner = (
        weighted[..., :-1, :-1]
        - first * mean[..., None, :]
        - mean[..., None] * first.transpose(2, 3)
    )
    inner = inner + total * mean[..., None] * mean[..., None, :]
    metric = torch.empty_like(weighted)
    metric[..., :-1, :-1] = inner * inverse[..., None] * inverse[..., None, :] / 4
    metric[..., :-1, -1:] = (first - total * mean[..., None]) * inverse[..., None] / 4
    metric[..., -1:, :-1] = metric[..., :-1, -1:].transpose(2, 3)
    metric[..., -1:, -1:] = total / 4
    metric.diagonal(dim1=2, dim2=3).mul_(1 + MARGIN)
    metric = metric.float()
    return _Scaled(signed, weight[:, order].float(), centre.double(), mean, inverse, metric)


def _moments(signed: Tensor, weight: Tensor) -> Tensor:
    """Return the second moments of the rows by each partition's weights [F, n],
    [h, F, (d + 1)^2]."""
    products = [
        (signed.transpose(1, 2) @ (signed * s.float()[None, :, None])).flatten(1) for s in weight
    ]
    return torch.stack(products, 1).double()


def _kinds(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct columns of weight [F, n], [F, A], and the number of each row's column,
    [n]."""
    # Hash each column to one number: sorting whole columns would take longer than the fit.
    mix = torch.rand(len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, kind = torch.unique(mix @ weight, return_inverse=True)
    first = torch.full_like(values, len(kind), dtype=torch.int64)
    first.scatter_reduce_(0, kind, torch.arange(len(kind)), "amin")
    kinds = weight[:, first]
    assert bool((kinds[:, kind] == weight).all()), "two different columns gave one number"
    return kinds, kind


class _Active:
    """Unfinished problems, as columns: p of P per head."""

    def __init__(self, scaled: _Scaled, partition: Tensor, c: Tensor) -> None:
        self.partition = partition
        self.mean = scaled.mean[:, partition]  # [h, p, d]
        self.inverse = scaled.inverse[:, partition]
        self.s = scaled.weight[partition]  # [p, n]
        ones = torch.ones(scaled.rows.shape[-1], dtype=torch.float64)
        ones[-1] = INTERCEPT_PENALTY
        self.penalty = (
            (ones / c[:, None]).expand(scaled.rows.shape[0], -1, -1).contiguous()
        )  # [h, p, d + 1]


def _solve(scaled: _Scaled, partition: Tensor, c: Tensor) -> tuple[Floats, Floats]:
    heads, _, size = scaled.rows.shape  # size: weights and intercept
    at = torch.zeros(
        heads, len(partition), size, dtype=torch.float64
    )  # where the gradient is taken
    before, result = at.clone(), at.clone()
    moment = torch.ones(heads, len(partition), dtype=torch.float64)
    lowest = torch.full_like(moment, torch.inf)
    alive = torch.arange(len(partition))
    active = _Active(scaled, partition, c)
    for step in range(MAX_STEPS):
        check = step > 0 and step % CHECK_EVERY == 0
        gradient, primal, dual = _evaluate(scaled, active, at, check)
        new, slope = _descend(scaled.metric, active, at, gradient)
        if check:
            moment = torch.where(primal > lowest, 1.0, moment)  # overshot: restart the momentum
            lowest = torch.minimum(primal, lowest)
            done = ((primal - dual) / primal.clamp_min(1e-300) <= GAP).all(
                0
            )  # a column leaves when done on every head
            result[:, alive[done]] = new[:, done]
            if bool(done.all()):
                break
            if bool(done.any()):
                keep = ~done
                alive = alive[keep]
                moment, lowest = moment[:, keep], lowest[:, keep]
                at, new = at[:, keep], new[:, keep]
                before = before[:, keep]
                gradient, slope = gradient[:, keep], slope[:, keep]
                active = _Active(scaled, partition[alive], c[alive])
        # gradient - slope is the curvature times (at - new): restart the momentum if the last move
        # opposed the step.
        moment = torch.where(((gradient - slope) * (new - before)).sum(-1) > 0, 1.0, moment)
        following = (1 + (1 + 4 * moment**2).sqrt()) / 2
        at = new + ((moment - 1) / following)[:, :, None] * (new - before)
        before, moment = new, following
    else:
        result[:, alive] = before
    raw = result[..., :-1] * scaled.inverse[:, partition]
    intercept = result[..., -1] - (raw * scaled.mean[:, partition]).sum(-1)
    intercept = intercept - (raw * scaled.centre).sum(-1)
    return raw.numpy(), intercept.numpy()


def _evaluate(
    scaled: _Scaled, active: _Active, at: Tensor, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of the loss [h, p, d + 1] at ``at``; with ``check``, primal and dual
    [h, p] over C."""
    weights = at[..., :-1] * active.inverse
    offset = at[..., -1:] - (weights * active.mean).sum(-1, keepdim=True)
    short = torch.cat([weights, offset], -1).float() @ scaled.rows.transpose(
        1, 2
    )  # [h, p, n] minus the margins
    wrong = torch.sigmoid(short)
    residual = wrong * active.s
    product = (residual @ scaled.rows).double()[..., :-1]  # [h, p, d]
    # The intercept's bound is so small that a sum in float32 could not reach it.
    total = residual.double() @ scaled.rows[0, :, -1:].double()  # [h, p, 1]
    gradient = torch.cat([(product - active.mean * total) * active.inverse, total], -1)
    if not check:
        return gradient, total, total
    loss = (torch.nn.functional.softplus(short) * active.s).sum(-1, dtype=torch.float64)
    primal = loss + (active.penalty * at.abs()).sum(-1)
    # The dual point: the residuals, shrunk until every coordinate's bound holds.
    shrink = (gradient.abs() / active.penalty).amax(-1, keepdim=True).clamp_min(1.0)
    point = wrong / shrink.float()
    complement = 1 - point
    entropy = point * point.clamp_min(TINY).log() + complement * complement.clamp_min(TINY).log()
    return gradient, primal, -(entropy * active.s).sum(-1, dtype=torch.float64)


def _descend(
    metric: Tensor, active: _Active, at: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    arrays = (tensor.numpy() for tensor in (metric, at, gradient, active.penalty))
    partition = active.partition.numpy()
    minima = [
        descend(h, partition, *start, SWEEPS, DECREASE) for h, *start in zip(*arrays, strict=True)
    ]
    new, slope = (torch.from_numpy(np.stack(values)) for values in zip(*minima, strict=True))
    return new, slope


# contract: fused multiply-add is allowed; nothing is reordered.
@njit(nogil=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def descend(
    metric: NDArray[np.float32],
    partition: NDArray[np.int64],
    start: Floats,
    gradient: Floats,
    penalty: Floats,
    sweeps: int,
    decrease: float,
) -> tuple[Floats, Floats]:
    """Return the minimisers and their gradients without the penalty, [P, D] each, of P L1-penalised
    quadratics

        minimise over w   g . (w - v) + 1/2 (w - v)' H (w - v) + sum_j penalty_j |w_j|

    by coordinate descent: metric H [F, D, D], partition [P], start v and its gradient g [P, D],
    penalty [P, D].  A problem stops after ``sweeps``, or when a sweep gains less than ``decrease``
    of the first sweep's gain.  Coordinates without curvature keep their start.  H and the running
    gradient are float32, which halves the memory traffic."""
    weights = start.copy()
    problems, size = start.shape
    slopes = gradient.astype(np.float32)
    for problem in range(problems):
        h = metric[partition[problem]]
        w, slope = weights[problem], slopes[problem]
        first = 0.0
        for sweep in range(sweeps):
            gained = 0.0
            for j in range(size):
                curvature = np.float64(h[j, j])
                if curvature <= 0.0:
                    continue
                target = curvature * w[j] - np.float64(slope[j])
                bound = penalty[problem, j]
                new = 0.0
                if target > bound:
                    new = (target - bound) / curvature
                elif target < -bound:
                    new = (target + bound) / curvature
                step = new - w[j]
                if step != 0.0:
                    w[j] = new
                    gained += curvature * step * step
                    row, short = h[j], np.float32(step)
                    for i in range(size):
                        slope[i] += short * row[i]
            if sweep == 0:
                first = gained
            if gained <= decrease * first:
                break
    return weights, slopes.astype(np.float64)
