"""Budgets that others publish: shares of KV heads, curves and tokens become budgets."""

import numpy as np
import pytest

from kvsurgery.errors import ProfileError
from kvsurgery.policy.evidence import Evidence
from kvsurgery.profile.importers.budgets import import_budgets
from kvsurgery.profile.importers.lu_kv import import_lu_kv
from kvsurgery.profile.importers.wg_kv import import_wg_kv
from tests.helpers.profile_files import MODEL, tsv


class TestWgKv:
    def test_shares_become_budgets(self, tmp_path):
        made = import_wg_kv(tsv(tmp_path / "0.5_retain_ratio.tsv", [[0.1, 0.9], [0.5, 0.5], [1, 0]]), MODEL)
        assert made.scores.tolist() == np.float32([[0.1, 0.9], [0.5, 0.5], [1, 0]]).tolist()
        assert Evidence(made).rest == "budgeted"

    def test_shares_lie_in_the_unit_interval(self, tmp_path):
        with pytest.raises(ProfileError, match=r"line 1: 1.001 is outside .* not a share of kept tokens"):
            import_wg_kv(tsv(tmp_path / "x.tsv", [[1.001, 0.9], [0.5, 0.5], [1, 0]]), MODEL)


def curves(layers=3, heads=2, seed=0):
    """Removed shares as LU-KV publishes them: row p - 1 removes p% of the cache."""
    spread = np.random.default_rng(seed).random((1, layers, heads)) * 0.5 + 0.75
    return np.clip(np.arange(1, 100).reshape(99, 1, 1) / 100 * spread / spread.mean(), 0, 1)


class TestLuKv:
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    @pytest.mark.parametrize("keep", [1, 20, 99])
    def test_a_row_of_removed_shares_becomes_kept_shares(self, tmp_path, dtype, keep):
        np.save(tmp_path / "curve.npy", curves().astype(dtype))
        made = import_lu_kv(tmp_path / "curve.npy", MODEL, keep)
        np.testing.assert_allclose(made.scores, 1 - curves()[99 - keep], atol=1e-3)
        assert (made.method, made.granularity, Evidence(made).rest) == ("lu-kv", "kv", "budgeted")
        assert made.provenance["keep_percent"] == keep

    def test_column_order_of_a_file_makes_no_difference(self, tmp_path):
        np.save(tmp_path / "c.npy", curves())
        np.save(tmp_path / "f.npy", np.asfortranarray(curves()))
        one, other = (import_lu_kv(tmp_path / name, MODEL, 50) for name in ("c.npy", "f.npy"))
        assert one.scores.tolist() == other.scores.tolist()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (curves(heads=4), "holds 3 x 4 scores, but org/model has 3 layers of 2 KV heads"),
            (curves()[:98], r"holds float64 of 98 x 3 x 2, not floats of 99 x layers x KV heads"),
            (curves()[0], "holds float64 of 3 x 2, not floats"),
            (np.float64(0.5), "holds float64 of no axis, not floats"),
            (curves().round().astype(int), "holds int64 of 99 x 3 x 2, not floats"),
            (curves().astype(complex), "holds complex128"),
            (curves() + 0.5, "removed shares lie in"),
            (curves() * np.nan, "removed shares lie in"),
            (curves()[::-1], "removes no more in its last row than in its first"),
            (np.array([None]), "holds object of 1, not floats"),
        ],
        ids=["heads", "rows", "one row", "scalar", "integers", "complex", "range", "nan", "kept shares", "pickle"],
    )
    def test_other_contents(self, tmp_path, content, message):
        np.save(tmp_path / "curve.npy", content)
        with pytest.raises(ProfileError, match=message):
            import_lu_kv(tmp_path / "curve.npy", MODEL, 50)

    def test_a_header_that_claims_more_than_the_file_has(self, tmp_path):
        np.save(tmp_path / "curve.npy", curves())
        raw = (tmp_path / "curve.npy").read_bytes()
        for claimed in (
            raw.replace(b"(99, 3, 2)", b"(99, 3,2000000000000)"),
            raw.replace(b"(99, 3, 2)", b"(99,-3,-2)"),
            raw.replace(b"(99, 3, 2)", b"(99, 3, 2"),
            raw[:-8],
            raw + b"\0",
        ):
            (tmp_path / "curve.npy").write_bytes(claimed)
            with pytest.raises(ProfileError, match=r"curve\.npy"):
                import_lu_kv(tmp_path / "curve.npy", MODEL, 50)

    @pytest.mark.parametrize("keep", [0, 100, -1])
    def test_a_share_that_no_row_has(self, tmp_path, keep):
        with pytest.raises(ProfileError, match=f"keeps 1 to 99 per cent of the cache, got {keep}"):
            import_lu_kv(tmp_path / "curve.npy", MODEL, keep)


class TestBudgets:
    def test_tokens_of_every_head(self, tmp_path):
        (tmp_path / "budgets.tsv").write_text('\ufeff128\t0\r\n16777216\t"1"\r\n7\t7\r\n\r\n', encoding="utf-8")
        made = import_budgets(tmp_path / "budgets.tsv", MODEL)
        assert made.scores.tolist() == [[128, 0], [1 << 24, 1], [7, 7]]
        assert (made.method, made.granularity, Evidence(made).rest) == ("budgets", "kv", "budgeted")

    @pytest.mark.parametrize("cell", ["1.5", "-1", "16777217", "9" * 5000, "", "1e3", "NaN", "\u0663"])
    def test_no_whole_number_of_tokens(self, tmp_path, cell):
        (tmp_path / "budgets.tsv").write_text(f"1\t2\n3\t{cell}\n5\t6\n", encoding="utf-8")
        with pytest.raises(ProfileError, match=r"line 2: .* is not a budget; budgets are whole numbers of tokens"):
            import_budgets(tmp_path / "budgets.tsv", MODEL)

    def test_a_profile_of_half_tokens(self):
        with pytest.raises(ProfileError, match="budgets are whole numbers of tokens"):
            MODEL.profile(np.full((3, 2), 0.5), "budgets", {})
