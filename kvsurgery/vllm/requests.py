"""Requests that budgeted heads cannot serve: they are refused where they come in, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from kvsurgery.vllm.forecast import has_budgets

MARK = "refuses_for_budgeted_heads"  # attribute of methods that do
BEAMS = (
    "beams are not served with budgeted heads: each step of a beam is a new prompt to vLLM, of which heads would "
    "select again; ask for samples (n), or for beams in transformers with trust_remote_code=True"
)
GROWING = (
    "prompts that come in parts are not served with budgeted heads, which have dropped tokens of the first part; send "
    "the whole prompt, or use transformers with trust_remote_code=True"
)


def refuse_beams_and_growing_prompts() -> None:
    """Let vLLM's classes in this process refuse them for engines with budgeted heads; others serve them as before."""
    _refuse(BeamSearchOfflineMixin, "beam_search", lambda llm: llm.llm_engine, BEAMS)
    _refuse(BeamSearchOnlineMixin, "beam_search", lambda serving: serving.engine_client, BEAMS)
    _refuse(AsyncLLM, "_add_streaming_input_request", lambda engine: engine, GROWING)


def _refuse(owner: type, name: str, engine_of: Callable[[Any], Any], message: str) -> None:
    """Let a method of a class raise where its engine has budgeted heads."""
    method = getattr(owner, name)
    if hasattr(method, MARK):  # by an earlier engine of this process
        return

    @wraps(method)
    def checked(self: Any, *args: Any, **options: Any) -> Any:
        if has_budgets(engine_of(self).vllm_config.model_config.hf_config):
            raise VLLMValidationError(message)
        return method(self, *args, **options)

    setattr(checked, MARK, True)
    setattr(owner, name, checked)
