"""Whatever a file holds, an importer makes a profile of it or says in one line why not."""

import json
import os
import pickle
import random
import threading

import numpy as np
import pytest
import torch

from kvsurgery.errors import ProfileError
from kvsurgery.heads.dimensions import ModelDimensions
from kvsurgery.profile.head_profile import HeadProfile
from kvsurgery.profile.importers import files
from kvsurgery.profile.importers.budgets import import_budgets
from kvsurgery.profile.importers.duo import import_duo
from kvsurgery.profile.importers.flexicache import import_flexicache
from kvsurgery.profile.importers.headkv import import_headkv
from kvsurgery.profile.importers.kvzip import import_kvzip
from kvsurgery.profile.importers.lu_kv import import_lu_kv
from kvsurgery.profile.importers.rlkv import import_rlkv
from kvsurgery.profile.importers.rtpurbo import import_rtpurbo
from kvsurgery.profile.importers.wg_kv import import_wg_kv
from kvsurgery.profile.profiled_model import ProfiledModel

MODEL = ProfiledModel("org/model", ModelDimensions(layers=3, query_heads=4, kv_heads=2, head_dim=8))
GATES = "0.5\t1.0\n0.25\t0.0\n1e-3\t0.125\n"
HEADWISE = {"sink_token_num": 4, "swa_token_num": 64, "0": [0, 1, 0, 0], "1": [1, 1, 0, 0], "2": [0, 0, 0, 0]}
CURVES = np.linspace(0.01, 0.99, 99)[:, None, None] * np.ones((1, 3, 2))


def whole(folder):
    """Of every format, how it is read and a file as it should be."""
    torch.save(torch.rand(3, 2, generator=torch.Generator().manual_seed(0)), folder / "a.pt")
    torch.save(torch.rand(3, 2), folder / "old.pt", _use_new_zipfile_serialization=False)
    np.save(folder / "a.npy", CURVES)
    trials = {f"{layer}-{head}": [0.5, 1] for layer in range(3) for head in range(4)}
    return {
        "duo": (import_duo, GATES.encode()),
        "rlkv": (import_rlkv, GATES.encode()),
        "wg-kv": (import_wg_kv, GATES.encode()),
        "budgets": (import_budgets, b"1\t2\n30\t40\n5\t6\n"),
        "headkv": (import_headkv, json.dumps(trials).encode()),
        "flexicache": (import_flexicache, json.dumps({"m": {"h": [[0, 1], [2, 0]]}}).encode()),
        "rtpurbo": (import_rtpurbo, json.dumps({"headwise_config": HEADWISE}).encode()),
        "kvzip": (lambda path, model: import_kvzip([path], model), (folder / "a.pt").read_bytes()),
        "kvzip, old": (lambda path, model: import_kvzip([path], model), (folder / "old.pt").read_bytes()),
        "lu-kv": (lambda path, model: import_lu_kv(path, model, 20), (folder / "a.npy").read_bytes()),
    }


def read_or_refused(read, path):
    """Whether a file became a profile."""
    try:
        made = read(path, MODEL)
    except ProfileError as error:
        line = str(error)
    else:
        line = None
    if line is not None:
        assert "\n" not in line
        assert len(line) < 500 + len(str(path))
        return False
    assert isinstance(made, HeadProfile)
    assert np.isfinite(made.scores).all()
    return True


FORMATS = ("duo", "rlkv", "wg-kv", "budgets", "headkv", "flexicache", "rtpurbo", "kvzip", "kvzip, old", "lu-kv")


@pytest.mark.parametrize("name", FORMATS)
class TestDamage:
    def test_whole_and_cut_short(self, tmp_path, name):
        read, content = whole(tmp_path)[name]
        path = tmp_path / "file"
        path.write_bytes(content)
        assert read_or_refused(read, path)
        for end in sorted({0, 1, 2, 9, *range(0, len(content), max(1, len(content) // 40))}):
            path.write_bytes(content[:end])
            read_or_refused(read, path)

    def test_flipped_bytes(self, tmp_path, name):
        read, content = whole(tmp_path)[name]
        path = tmp_path / "file"
        for seed in range(250):
            rng, damaged = random.Random(seed), bytearray(content)
            for _ in range(rng.choice((1, 1, 2, 8))):
                damaged[rng.randrange(len(content))] = rng.choice((rng.randrange(256), *b'\0\t\n",0-9e[]{}.(R'))
            path.write_bytes(damaged)
            read_or_refused(read, path)

    def test_a_file_of_another_format(self, tmp_path, name):
        formats = whole(tmp_path)
        path = tmp_path / "file"
        for content in [content for _, content in formats.values()] + [
            b"\xff" * 999,
            b"PK\3\4" + bytes(99),
            b"\n" * 99,
        ]:
            path.write_bytes(content)
            read_or_refused(formats[name][0], path)

    def test_files_that_never_end(self, tmp_path, monkeypatch, name):
        monkeypatch.setattr(files, "LARGEST_SCORES_FILE", 1 << 20)
        with pytest.raises(ProfileError, match="is over 1 MiB; this is not a file of head scores"):
            whole(tmp_path)[name][0]("/dev/zero", MODEL)

    def test_a_pipe(self, tmp_path, name):
        read, content = whole(tmp_path)[name]
        os.mkfifo(tmp_path / "pipe")
        threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(content,), daemon=True).start()
        assert read_or_refused(read, tmp_path / "pipe")


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace):
        self.trace = str(trace)

    def __reduce__(self):
        return os.mkdir, (self.trace,)


class TestPickles:
    def test_no_code_runs(self, tmp_path):
        trace, path = tmp_path / "trace", tmp_path / "file"
        bomb = Bomb(trace)
        torch.save(bomb, path)
        contents = [path.read_bytes(), pickle.dumps(bomb), pickle.dumps(bomb, 0)]
        torch.save({"scores": [bomb, torch.zeros(3, 2)]}, path)
        contents.append(path.read_bytes())
        array = np.empty((99, 3, 2), dtype=object)
        array[:] = bomb
        np.save(path, array, allow_pickle=True)
        contents.append((tmp_path / "file.npy").read_bytes())
        for name, (read, _) in whole(tmp_path).items():
            for content in contents:
                path.write_bytes(content)
                assert not read_or_refused(read, path), name
                assert not trace.exists(), name

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.zeros(1).expand(1 << 40, 1 << 20),
            torch.zeros(1).expand(3, 1 << 40),
            torch.zeros(3, 2).to_sparse(),
            torch.zeros(3, 2, dtype=torch.complex64),
            torch.zeros(3, 2, device="meta"),
            torch.full((3, 2), -1.0),
            torch.full((3, 2), float("inf")),
            torch.zeros(0, 2),
            torch.tensor(1.0),
        ],
        ids=["huge", "wide", "sparse", "complex", "meta", "negative", "infinite", "empty", "scalar"],
    )
    def test_strange_tensors(self, tmp_path, tensor):
        torch.save(tensor, tmp_path / "a.pt")
        assert not read_or_refused(lambda path, model: import_kvzip([path], model), tmp_path / "a.pt")

    def test_parameters_and_double_precision(self, tmp_path):
        for tensor in (torch.nn.Parameter(torch.ones(3, 2)), torch.ones(3, 2, dtype=torch.float64)):
            torch.save(tensor, tmp_path / "a.pt")
            assert read_or_refused(lambda path, model: import_kvzip([path], model), tmp_path / "a.pt")
