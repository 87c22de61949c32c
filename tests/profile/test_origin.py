"""Which model a file of scores is of: without a path in it, and found again where it can be."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvsurgery.checkpoint.fingerprint import fingerprint
from kvsurgery.checkpoint.source import read_weights
from kvsurgery.conversion.converted import original_fingerprint
from kvsurgery.errors import CheckpointError
from kvsurgery.profile import origin
from kvsurgery.profile.origin import ModelOrigin
from tests.helpers.shards import llama_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A working directory without models, with notes of its own."""
    monkeypatch.setattr(origin, "notes_folder", lambda: tmp_path / "notes")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def model(here) -> Path:
    return Path(llama_checkpoint(here / "models" / "llama"))


def of(folder: Path) -> str:
    return fingerprint(read_weights(folder)[0])


class TestFingerprint:
    def test_shards_make_no_difference(self, here, model):
        weights = load_file(model / "model.safetensors")
        names = {"a.safetensors": [*weights][::2], "b.safetensors": [*weights][1::2]}
        shards = here / "shards"
        shards.mkdir()
        for shard, held in names.items():
            save_file({name: weights[name] for name in held}, shards / shard, {"format": "pt"})
        places = {name: shard for shard, held in names.items() for name in held}
        (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        assert of(shards) == of(model)

    def test_one_changed_tensor_makes_one(self, model):
        before, path = of(model), model / "model.safetensors"
        weights = load_file(path)
        name = next(name for name in weights if "q_proj" in name)
        save_file({**weights, name: weights[name] + 1}, path, {"format": "pt"})
        assert of(model) != before

    @pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
    def test_a_converted_checkpoint_gives_that_of_its_original(self, mixed, family):
        converted = mixed(family)
        assert any(layer.order != tuple(sorted(layer.order)) for layer in converted.policy.layers)
        assert original_fingerprint(converted.folder) == original_fingerprint(converted.source) == of(converted.source)


class TestName:
    @pytest.mark.parametrize("path", ["{model}", "{model}/", "{model}/.", "../models/llama"])
    def test_the_folder_without_its_path(self, model, path):
        named = ModelOrigin.of_folder(Path(path.format(model=model)))
        assert (named.name, named.revision, named.fingerprint) == ("llama", None, of(model))

    def test_a_part_of_a_download_is_known_by_its_config(self, here):
        folder = Path(llama_checkpoint(here / "part", shards=2))
        next(folder.glob("*.safetensors")).unlink()
        named = ModelOrigin.of_folder(folder)
        assert named.place([here / "profile.safetensors"]) == (str(folder), None)
        shutil.rmtree(folder)
        with pytest.raises(CheckpointError, match="called part"):
            named.place([here / "profile.safetensors"])

    def test_the_working_directory(self, model, monkeypatch):
        monkeypatch.chdir(model)
        assert ModelOrigin.of_folder(Path()).name == "llama"

    def test_a_snapshot_of_the_hubs_cache(self, here, model):
        snapshot = here / "hub/models--some--model-v1.0/snapshots" / COMMIT
        shutil.copytree(model, snapshot)
        assert ModelOrigin.of_folder(snapshot) == ModelOrigin("some/model-v1.0", COMMIT, of(model))
        link = here / "link"
        link.symlink_to(snapshot)
        assert ModelOrigin.of_folder(link).name == "some/model-v1.0"

    def test_the_name_in_the_config_is_of_what_was_trained_further(self, model):
        config = (model / "config.json").read_text()
        (model / "config.json").write_text(config.replace("{", '{"_name_or_path": "meta-llama/Llama-3.1-8B",', 1))
        assert ModelOrigin.of_folder(model).name == "llama"


class TestPlace:
    def test_where_it_was(self, model):
        named = ModelOrigin.of_folder(model)
        named.remember(model)
        assert named.place([]) == (str(model), None)

    @pytest.mark.parametrize("name", ["llama", "renamed"])
    def test_beside_the_scores(self, here, model, name):
        named = ModelOrigin.of_folder(model)
        model.rename(here / name)
        assert named.place([here / "profile.safetensors"]) == (str(here / name), None)

    def test_in_the_working_directory(self, model):
        named = ModelOrigin.of_folder(model)
        model.rename("llama")
        assert named.place([]) == ("llama", None)

    def test_other_weights_of_the_name_are_not_taken(self, here, model):
        named = ModelOrigin.of_folder(model)
        named.remember(model)
        path = model / "model.safetensors"
        save_file({name: np.zeros_like(tensor) for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        with pytest.raises(CheckpointError, match=r"a folder called llama, .* as SRC"):
            named.place([here / "models" / "profile.safetensors"])

    def test_a_conversion_that_moved_no_head_is_not_the_original(self, here, all_full):
        converted = all_full("llama")
        shutil.copytree(converted.folder, here / "work" / "converted")
        named = ModelOrigin.of_folder(converted.source)
        assert of(here / "work" / "converted") == named.fingerprint
        with pytest.raises(CheckpointError, match="not found again"):
            named.place([])

    def test_a_folders_name_is_no_hub_id(self, model):
        named = ModelOrigin.of_folder(model)
        shutil.rmtree(model)
        with pytest.raises(CheckpointError, match="called llama"):
            named.place([])

    def test_the_hub_where_no_copy_is_here(self):
        assert ModelOrigin("some/model", COMMIT, "ab").place([]) == ("some/model", COMMIT)
        assert ModelOrigin("some/model", COMMIT).place([]) == ("some/model", COMMIT)

    def test_profiles_of_earlier_versions_have_paths(self):
        assert ModelOrigin("./models/llama").place([]) == ("./models/llama", None)

    def test_damaged_neighbors_and_notes_do_no_harm(self, here, model):
        named = ModelOrigin.of_folder(model)
        for name, content in {"a": b"{", "b": b"\0" * 100}.items():
            (here / "models" / name).mkdir()
            for file in ("config.json", "model.safetensors"):
                (here / "models" / name / file).write_bytes(content)
        (here / "notes").mkdir()
        (here / "notes" / named.fingerprint).write_bytes(b"\0\xff\n")
        assert named.place([here / "models" / "p.safetensors"]) == (str(model), None)

    def test_notes_that_cannot_be_written(self, here, model):
        (here / "notes").write_text("a file")
        ModelOrigin.of_folder(model).remember(model)
        assert os.listdir(here / "models") == ["llama"]
