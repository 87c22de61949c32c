"""What names a folder, a model or a file of the Hub, and what does not."""

from pathlib import Path

import pytest

from kvsurgery.errors import CheckpointError, HubError
from kvsurgery.system.repo_id import HubFile, cached_origin, checkpoint_folder, did_you_mean


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://org/scores/a.tsv", ("org/scores", "a.tsv", None)),
        ("hf://org/scores/a b/lr=0.02/c.tsv", ("org/scores", "a b/lr=0.02/c.tsv", None)),
        ("hf://org/scores/folder/", ("org/scores", "folder", None)),
        ("hf://org/scores/a/b.tsv@v1.0", ("org/scores", "a/b.tsv", "v1.0")),
        ("hf://org/scores/b.tsv@refs/pr/1", ("org/scores", "b.tsv", "refs/pr/1")),
        ("hf://org/scores@v1.0/a/b.tsv", ("org/scores", "a/b.tsv", "v1.0")),
        ("https://huggingface.co/org/scores/blob/main/a%20b/c.tsv", ("org/scores", "a b/c.tsv", "main")),
        ("https://huggingface.co/org/scores/resolve/v1/c.tsv?download=true", ("org/scores", "c.tsv", "v1")),
        ("https://hf.co/org/scores/tree/refs%2Fpr%2F1/folder/", ("org/scores", "folder", "refs/pr/1")),
        ("http://mirror:8080/org/scores/raw/main/c.tsv", ("org/scores", "c.tsv", "main")),
        ("./hf/org/scores/a.tsv", None),
        ("C:\\scores\\a.tsv", None),
        ("org/scores/a.tsv", None),
        ("hf:/org/scores/a.tsv", None),
    ],
)
def test_files(monkeypatch, source, expected):
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror:8080")
    assert HubFile.parse(source) == (expected and HubFile(*expected))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://org/scores", "is not a file of a model repository: write hf://owner/repo/path"),
        ("hf://org/scores/", "is not a file of a model repository"),
        ("hf://", "is not a file of a model repository"),
        ("hf://datasets/org/scores/a.tsv", "is not a file of a model repository"),
        ("hf://org/scores@v1/a.tsv@v2", "is not a file of a model repository"),
        ("hf://org/../a.tsv", "is not a file of a model repository"),
        ("https://huggingface.co/org/scores", "is not a file of a model repository: give its page, https://hugg"),
        ("https://huggingface.co/datasets/org/scores/blob/main/a.tsv", "is not a file of a model repository"),
        ("https://huggingface.co/org/scores/resolve/main/", "is not a file of a model repository"),
        (
            "https://github.com/org/scores/blob/main/a.tsv",
            "download https://github.com/org/scores/blob/main/a.tsv first",
        ),
        ("https:///org/scores/blob/main/a.tsv", "only files of the Hub are fetched"),
        ("http://[", "only files of the Hub are fetched"),
    ],
)
def test_anything_else(monkeypatch, source, message):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    with pytest.raises(HubError, match=message):
        HubFile.parse(source)


def test_a_checkpoint_is_a_folder_or_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    assert checkpoint_folder("owner/model") == Path("owner/model")  # a folder comes first
    assert checkpoint_folder("owner/other") is None
    assert checkpoint_folder("model") is None
    with pytest.raises(CheckpointError, match="name of the checkpoint is empty"):
        checkpoint_folder("")
    for source, reason in {
        "file": "is a file; give the folder of the checkpoint",
        "./model": "is neither a folder nor a Hub id",
        "owner/model/config.json": "is neither a folder nor a Hub id",
    }.items():
        with pytest.raises(CheckpointError, match=f"^{source} {reason}"):
            checkpoint_folder(source)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("modls/lama3", "models/llama3"),
        ("./models/Llama3", "models/llama3"),
        ("{here}/models/llama-3", "{here}/models/llama3"),
        ("models/other", None),
        ("elsewhere/llama3", None),
        ("models/llama3/nothing", None),
    ],
)
def test_a_path_that_was_mistyped(tmp_path, monkeypatch, typed, meant):
    (tmp_path / "models/llama3").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hint = did_you_mean(typed.format(here=tmp_path))
    assert hint == (f"; did you mean {meant.format(here=tmp_path)}?" if meant else "")


@pytest.mark.parametrize(
    ("repo", "folder", "expected"),
    [
        ("models--meta-llama--Llama-3.1-8B", "", "meta-llama/Llama-3.1-8B"),
        ("models--gpt2", "", "gpt2"),
        ("models--org--name", "/part/one", "org/name/part/one"),
        ("datasets--org--name", "", None),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_folders_in_a_cache_of_the_hub(tmp_path, repo, folder, expected, linked):
    commit = "0123456789" * 4
    path = Path(f"{tmp_path}/hub/{repo}/snapshots/{commit}{folder}/")
    path.mkdir(parents=True)
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    assert cached_origin(path) == (expected and (expected, commit))
    assert cached_origin(path.parent) is None or folder
