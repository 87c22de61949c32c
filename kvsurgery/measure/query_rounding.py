"""Factors by which keys are rounded, from the queries that a model's heads had on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.query_factors import QueryFactors
from kvsurgery.templates.kv_codes import rotation
from kvsurgery.templates.kv_rounding import QueryRounding

DAMPING = 0.01  # of the mean square of a query's element, so that directions without queries count a little


def query_factors(covariance: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The order in which channels of keys are rounded, and how their errors are fed back; see `QueryFactors`.

    Args:
        covariance: float64 [..., head_dim, head_dim], sums of q q^T over the queries of KV heads.

    Returns:
        int16 [..., head_dim], and float16 [..., head_dim, head_dim], strictly upper triangular.
    """
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1)[..., None, None].clamp_min(torch.finfo(torch.float64).tiny)
    order = diagonal.argsort(dim=-1, descending=True, stable=True)
    ordered = covariance.take_along_dim(order[..., None], -2).take_along_dim(order[..., None, :], -1) / mean
    damped = ordered + DAMPING * torch.eye(ordered.shape[-1], dtype=ordered.dtype, device=ordered.device)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    feedback = (factor / factor.diagonal(dim1=-2, dim2=-1)[..., None]).triu(1)
    return order.to(torch.int16).numpy(), feedback.to(torch.float16).numpy()


def measured_factors(
    covariance: torch.Tensor, layers: Sequence[int], model: ModelDimensions
) -> dict[str, QueryFactors]:
    """Factors of a model by what is rotated, from the covariances [layers, ...] of these layers, as `query_factors`."""
    matrix = rotation(model.head_dim, covariance.dtype, covariance.device)
    factors = {}
    for rotate, stored_covariance in (("values", covariance), ("both", matrix @ covariance @ matrix.mT)):
        factors[rotate] = QueryFactors.unmeasured(model)
        factors[rotate].order[layers], factors[rotate].feedback[layers] = query_factors(stored_covariance)
    return factors


def roundings(
    factors: Mapping[str, QueryFactors], layers: Sequence[int], device: torch.device
) -> dict[str, dict[int, QueryRounding]]:
    """How the heads of these layers round their keys, by what is rotated and by layer."""
    by_rotation: dict[str, dict[int, QueryRounding]] = {}
    for rotate, model_factors in factors.items():
        order = torch.from_numpy(model_factors.order)
        feedback = torch.from_numpy(model_factors.feedback)
        by_rotation[rotate] = {
            layer: QueryRounding(order[layer].long(), feedback[layer]).to(device) for layer in layers
        }
    return by_rotation
