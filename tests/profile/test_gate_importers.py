"""Trained gates that others publish: tables of DuoAttention and RLKV become scores."""

import pytest
from blake3 import blake3

from kvsurgery import __version__
from kvsurgery.errors import ProfileError
from kvsurgery.profile.importers import files
from kvsurgery.profile.importers.duo import import_duo
from kvsurgery.profile.importers.rlkv import import_rlkv
from kvsurgery.profile.profiled_model import ProfiledModel
from tests.helpers.profile_files import GATES, GQA, MODEL, dump, tsv


class TestDuo:
    def test_scores_are_clipped(self, tmp_path):
        made = import_duo(tsv(tmp_path / "gates.tsv"), ProfiledModel("org/model", GQA, "abc"))
        assert made.scores.tolist() == [[0.5, 1], [0, 1], [0.25, 0]]
        assert (made.method, made.granularity, made.model) == ("duo", "kv", GQA)
        assert (made.base_model, made.base_revision) == ("org/model", "abc")
        assert (made.sink, made.recent) == (None, None)

    def test_folder_with_its_config(self, tmp_path):
        table = tsv(tmp_path / "full_attention_heads.tsv")
        config = {"sink_size": 128, "recent_size": 256, "num_steps": 2000, "lr": 0.02, "output_dir": "/home/someone"}
        dump(tmp_path / "config.json", config)
        made = import_duo(tmp_path, MODEL)
        assert (made.sink, made.recent) == (128, 256)
        assert made == import_duo(table, MODEL)
        assert made.provenance == {
            "source": "full_attention_heads.tsv",
            "blake3": blake3(table.read_bytes()).hexdigest(),
            "origin": "DuoAttention",
            "tool": f"kvsurgery {__version__}",
            "training": {"num_steps": 2000, "lr": 0.02},
        }

    def test_the_place_of_the_file_leaves_no_trace(self, tmp_path):
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            tsv(tmp_path / name / "full_attention_heads.tsv")
        assert (
            import_duo(tmp_path / "one", ProfiledModel("m", GQA)).hash
            == import_duo(tmp_path / "other", ProfiledModel("m", GQA)).hash
        )

    def test_a_model_s_config_beside_it_says_nothing(self, tmp_path):
        tsv(tmp_path / "full_attention_heads.tsv")
        dump(tmp_path / "config.json", {"model_type": "llama"})
        assert import_duo(tmp_path, MODEL).sink is None

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (GATES[:2], "holds 2 x 2 scores, but org/model has 3 layers of 2 KV heads; was another model measured"),
            ([row * 2 for row in GATES], "holds 3 x 4 scores, but org/model has 3 layers of 2 KV heads"),
            ([], "holds 0 x 0 scores"),
            ([[1, 1], [1], [1, 1]], "line 2: 1 scores, but 2 in line 1"),
            ([[1, 1], [1, 1.02], [1, 1]], r"line 2: 1.02 is outside \[0, 1\]; this is not a DuoAttention gate"),
            ([[-0.02, 1], [1, 1], [1, 1]], r"line 1: -0.02 is outside \[0, 1\]"),
            ([[1, 1], [1, 1], [1, float("nan")]], r"line 3: nan is outside \[0, 1\]"),
            ([[1, 1], [1, 1], [float("inf"), 1]], r"line 3: inf is outside \[0, 1\]"),
        ],
        ids=["layers", "query heads", "empty", "ragged", "high", "low", "nan", "inf"],
    )
    def test_bad_tables(self, tmp_path, rows, message):
        with pytest.raises(ProfileError, match=message) as raised:
            import_duo(tsv(tmp_path / "gates.tsv", rows), MODEL)
        assert str(tmp_path / "gates.tsv") in str(raised.value)

    @pytest.mark.parametrize(
        "content",
        [
            "\ufeff1\t0.5\n0\t0\n1\t1\n".encode(),
            "1\t0.5\r\n0\t0\r\n1\t1\r\n".encode("utf-16"),
            b"1\t0.5\n0\t0\n1\t1\n\n\n",
            b"1\t0.5\n0\t0\n1\t1\n\t\n \r\n",
            b"1\t0.5\r\n0\t0\r\n1\t1",
            b"# layers x heads\n1\t0.5\n0\t0\n# the last\n1\t1\n",
            b'"1"\t"0.5"\n\'0\'\t0 \n1\t 1\n',
        ],
        ids=["BOM", "UTF-16", "blank lines", "empty rows", "CRLF", "comments", "quotes"],
    )
    def test_tables_as_programs_write_them(self, tmp_path, content):
        (tmp_path / "gates.tsv").write_bytes(content)
        assert import_duo(tmp_path / "gates.tsv", MODEL).scores.tolist() == [[1, 0.5], [0, 0], [1, 1]]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            *(
                (text, r", line \d: .* is not a number")
                for text in (b"a\tb\n", b"1 1\n", b"1,1\n", b"1\t\n", b"1\n\n1")
            ),
            (b"\x89PNG\r\n\0\0", " is not a table of tab-separated numbers$"),
        ],
    )
    def test_not_a_table(self, tmp_path, content, message):
        path = tmp_path / "gates.tsv"
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=f"gates.tsv{message}"):
            import_duo(path, MODEL)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("{", "config.json is not JSON"),
            ("[" * 200_000, "config.json is not JSON"),
            ([1], "config.json holds no JSON object"),
            ({"sink_size": -1}, "sink_size must be a whole number >= 0, got -1"),
            ({"sink_size": 12.5}, "sink_size must be a whole number >= 0, got 12.5"),
            ({"sink_size": True}, "sink_size must be a whole number >= 0, got True"),
            ({"recent_size": 0}, "recent_size must be a whole number >= 1, got 0"),
            ({"recent_size": "256"}, "recent_size must be a whole number >= 1, got '256'"),
        ],
        ids=range(8),
    )
    def test_bad_config(self, tmp_path, config, message):
        tsv(tmp_path / "full_attention_heads.tsv")
        dump(tmp_path / "config.json", config)
        with pytest.raises(ProfileError, match=message):
            import_duo(tmp_path, MODEL)

    def test_nothing_there(self, tmp_path):
        with pytest.raises(ProfileError, match=r"cannot read .*full_attention_heads.tsv: No such file"):
            import_duo(tmp_path, MODEL)
        with pytest.raises(ProfileError, match=r"cannot read .*gates.tsv: No such file"):
            import_duo(tmp_path / "gates.tsv", MODEL)

    def test_a_file_far_too_large(self, tmp_path):
        with open(tmp_path / "gates.tsv", "wb") as file:
            file.truncate(files.LARGEST_SCORES_FILE + 1)
        with pytest.raises(ProfileError, match="over 1,024 MiB; this is not a file of head scores"):
            import_duo(tmp_path / "gates.tsv", MODEL)


class TestRlkv:
    def test_gates_beyond_the_unit_interval(self, tmp_path):
        made = import_rlkv(tsv(tmp_path / "adapter_weights.tsv", [[-0.0106, 1.008], [0.5, 0], [1, 0.25]]).parent, MODEL)
        assert made.scores.tolist() == [[0, 1], [0.5, 0], [1, 0.25]]
        assert (made.method, made.granularity, made.sink, made.recent) == ("rlkv", "kv", 128, 256)

    def test_other_tables(self, tmp_path):
        with pytest.raises(ProfileError, match=r"line 2: 1.05 is outside \[0, 1\]; this is not a RLKV gate"):
            import_rlkv(tsv(tmp_path / "x.tsv", [[1, 1], [1, 1.05], [1, 1]]), MODEL)
        with pytest.raises(ProfileError, match="holds 2 x 2 scores, but org/model has 3 layers of 2 KV heads"):
            import_rlkv(tsv(tmp_path / "y.tsv", [[1, 1], [1, 1]]), MODEL)
