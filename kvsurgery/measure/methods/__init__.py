"""Methods of measurement, a module each: what `kvsurgery profile compute` offers.

Its options are the fields that are a `setting`. Modules import neither torch nor numpy before they measure, so that
`--help` is fast.
"""

from kvsurgery.measure.methods.attention import Attention
from kvsurgery.measure.methods.duo import Duo
from kvsurgery.measure.methods.headkv import HeadKV
from kvsurgery.measure.methods.kv_bits import KVBits
from kvsurgery.measure.methods.method import Method
from kvsurgery.measure.methods.reform import Reform
from kvsurgery.measure.methods.rlkv_lite import RLKVLite

METHODS: dict[str, type[Method]] = {
    "duo": Duo,
    "rlkv-lite": RLKVLite,
    "attention": Attention,
    "headkv-r": HeadKV,
    "headkv-er": HeadKV,
    "headkv-r2": HeadKV,
    "reform": Reform,
    "kv-bits": KVBits,
}
