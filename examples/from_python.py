"""Convert the bundled model from Python, check the result, and give the original back.

python examples/from_python.py FOLDER
"""

import sys
from pathlib import Path

from kvsurgery import HeadProfile, Recipe, convert, inspect, revert, verify

here, folder = Path(__file__).parent / "tiny-recall", Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)

profile = HeadProfile.load(here / "profile.safetensors")
recipe = Recipe.of(sparsity=0.5, sink=4, recent=32, kv_bits=8)
recipe.save(folder / "recipe.toml")

converted = convert(here / "model", folder / "converted", profile, recipe)
print(f"{converted.moved} of {converted.tensors} tensors moved")
surgery = inspect(folder / "converted").surgery
print(f"{sum(filter(None, surgery.full_heads))} heads are full, {surgery.streaming} stream")
print(f"{verify(folder / 'converted').tensors} tensors are as they were written")
print(f"{revert(folder / 'converted', folder / 'original').files} other files are given back")
