"""`vllm serve` over two processes, with no option that names kvsurgery, asked by the OpenAI client."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import requests

from kvsurgery.profile.head_profile import HeadProfile
from tests.helpers.surgery import Converted, convert_folder
from tests.helpers.tiny_recall import FOLDER
from tests.vllm.serving import BLOCK, BUDGETED, converted, prompts, reference

STARTS_WITHIN = 900  # seconds
LIMIT = 1024
CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"
QUESTION, ANSWER = "remember dofi doge nedi fibu . recall dofi", "doge nedi fibu ."


@dataclass
class Server:
    """A server of a converted checkpoint; `log` is what it printed."""

    checkpoint: Converted
    url: str
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} (.*)$", text, re.MULTILINE))


def arguments(server: Server, **options: object) -> dict[str, object]:
    return {"model": str(server.checkpoint.folder), "temperature": 0, "max_tokens": 4, **options}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    profile = HeadProfile.load(FOLDER / "profile.safetensors")
    options = {"full_heads": 4, "sink": 4, "recent": 32, "tp": 2}
    checkpoint = convert_folder(FOLDER / "model", folder / "converted", profile, **options)
    (folder / "chat.jinja").write_text(CHAT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("vllm"), "serve", checkpoint.folder, "--port", port]
    command += ["--tensor-parallel-size", 2, "--max-model-len", LIMIT, "--dtype", "float32", "--enforce-eager"]
    command += ["--block-size", BLOCK, "--chat-template", folder / "chat.jinja"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output, env=environment)
    try:
        found = Server(checkpoint, f"http://127.0.0.1:{port}", log)
        _await(found, process)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _await(server: Server, process: subprocess.Popen) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end and process.poll() is None:
        try:
            requests.get(f"{server.url}/health", timeout=5).raise_for_status()
            return
        except requests.RequestException:
            time.sleep(1)
    raise AssertionError(server.log.read_text()[-4000:])


def test_tokens_are_those_of_the_emitted_model(server: Server) -> None:
    rows = prompts(295, (5, 100, 400))
    options = {"max_tokens": 24, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    for row, (tokens, _) in zip(rows, reference(server.checkpoint.model, rows), strict=True):
        answer = server.client.completions.create(**arguments(server, prompt=row, **options))
        assert answer.choices[0].token_ids == tokens


def test_the_server_says_what_its_processes_hold(server: Server) -> None:
    assert "2 full and 4 streaming KV heads in this process" in server.log.read_text()


def test_chat_and_streaming(server: Server) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    whole = server.client.chat.completions.create(**arguments(server, messages=messages))
    assert whole.choices[0].message.content.strip() == ANSWER
    stream = server.client.chat.completions.create(**arguments(server, messages=messages, stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts).strip() == ANSWER
    assert len(parts) > 2


def test_several_clients_and_one_that_leaves(server: Server) -> None:
    rows = prompts(295, (300, 310, 320, 330))
    wanted = [tokens for tokens, _ in reference(server.checkpoint.model, rows)]

    async def ask() -> list[list[int]]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        options = {"max_tokens": 24, "extra_body": {"ignore_eos": True, "return_token_ids": True}}

        async def leave() -> None:
            endless = {**options, "max_tokens": 600, "stream": True}
            stream = await client.completions.create(**arguments(server, prompt=rows[0], **endless))
            await anext(aiter(stream))
            await stream.close()

        answers = [client.completions.create(**arguments(server, prompt=row, **options)) for row in rows]
        answers = await asyncio.gather(leave(), *answers)
        return [answer.choices[0].token_ids for answer in answers[1:]]

    assert asyncio.run(ask()) == wanted
    end = time.monotonic() + 60
    while server.metric("vllm:kv_cache_usage_perc") + server.metric("vllm:num_requests_running"):
        assert time.monotonic() < end, "the request that was left still holds blocks"
        time.sleep(0.2)


def test_a_prompt_beyond_the_context_is_refused(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="context length"):
        server.client.completions.create(**arguments(server, prompt=[5] * (LIMIT + 1)))
    answer = server.client.completions.create(**arguments(server, prompt=QUESTION))
    assert answer.choices[0].text.strip() == ANSWER


def test_a_refusal_is_the_last_line_before_weights_load(tmp_path: Path) -> None:
    folder = converted("llama", tmp_path, **BUDGETED, hold=16).folder
    for weights in folder.glob("*.safetensors"):
        weights.unlink()  # which nothing reads
    command = [Path(sys.executable).with_name("vllm"), "serve", folder, "--skip-tokenizer-init"]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=STARTS_WITHIN)
    assert run.returncode
    assert "budgets that hold after the prompt" in run.stderr.rstrip().rpartition("\n")[2]
    assert "EngineCore" not in run.stdout + run.stderr
