"""The code of a converted checkpoint: the modeling file of its family, and the modules that this file names."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvsurgery.checkpoint.family import Family
from kvsurgery.checkpoint.quantization import Layout
from kvsurgery.emit.rendering import template_environment
from kvsurgery.policy.policy import Policy
from kvsurgery.system.resources import TEMPLATES
from kvsurgery.version import __version__

HEADER = f"""\
# SPDX-License-Identifier: Apache-2.0
# Emitted by kvsurgery {__version__}. README.md of this folder says in what order to read its files.
"""


@dataclass(frozen=True)
class Needs:
    """What a checkpoint needs beside the code of every checkpoint."""

    reform: bool = False  # long prompts are gathered
    budgets: bool = False  # a layer has budgeted heads
    holds: bool = False  # their budgets hold after the prompt
    quantized: bool = False  # tokens are stored as codes, or may be
    rounding: bool = False  # their keys are rounded by the queries
    kernels: bool = True  # in Triton, and a loop in C over codes
    engine: str = ""  # what its weights are, if transformers takes their codes for weights

    @classmethod
    def of(cls, policy: Policy, weights: Layout | None = None) -> Needs:
        """What a policy's checkpoint needs, whose quantized weights have a layout."""
        layers = policy.layout.layers
        return cls(
            reform=policy.reform is not None,
            budgets=any(layer.budgets for layer in layers),
            holds=any(layer.budgets and layer.holds for layer in layers),
            quantized=policy.recipe.code.quantized or any(layer.quantization for layer in layers),
            rounding=any(layer.rounded_by_queries for layer in layers),
            kernels=policy.recipe.code.kernels,
            engine=weights.title if weights and not weights.transformers else "",
        )


def modeling_code(family: Family, needs: Needs) -> str:
    """The source of a family's modeling file."""
    model, *_, generator = family.classes.values()
    return (
        template_environment()
        .get_template("modeling_kvsurgery.py.jinja")
        .render(
            vars(family.modeling),
            model=model,
            generator=generator,
            auto_class=[*family.classes][-1],
            states=family.states,
            needs=needs,
        )
    )


def code_files(family: Family, needs: Needs) -> dict[str, bytes]:
    """Every code file of a converted checkpoint by name, in the order to read them: no more than the model runs."""
    modeling = modeling_code(family, needs)
    files = {f"{family.module}.py": modeling}
    for module in re.findall(r"^ *from \.(\w+) import", modeling, re.MULTILINE):
        files[f"{module}.py"] = (TEMPLATES / f"{module}.py").read_text(encoding="utf-8")
    return {name: f"{HEADER}{code}".encode() for name, code in files.items()}
