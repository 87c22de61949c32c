"""RULER's samples, for the tests of its tasks."""

from functools import cache

from kvsurgery.evaluate.sample import Reader
from kvsurgery.evaluate.tasks.ruler.puzzles import WORDS
from kvsurgery.evaluate.tasks.ruler.task import TASKS, RulerTask
from kvsurgery.text.haystack import Haystack
from tests.helpers.vocabularies import tokenizer

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
MADE = [task for task in TASKS if not task.startswith("qa")]  # without a file
MANY = 1 << 20


@cache
def spelling(kind, chat=False):
    """A tokenizer that has seen all words there are, but for "words" the ones that are made up."""
    texts = [PRINTABLE, " ".join(word for words in WORDS.values() for word in words)]
    if kind == "bytes":
        return tokenizer(kind, texts, size=3000, chat=chat)
    plain = spelling("bytes")
    texts.append(plain.decode(Haystack.read(None, plain, 5000).tokens))
    made = tokenizer(kind, texts, size=3000, chat=chat)
    if kind == "words":  # what is made up is unknown, which does not matter to how many tokens there are
        made.unk_token = None
    return made


def reader(kind="bytes", seed=0, max_context=MANY, chat=False):
    spelt = spelling(kind, chat)
    return Reader(spelt, max_context, len(spelt), seed)


def samples(whom, lengths, tasks=None, **options):
    return list(RulerTask(lengths, tasks, **{"count": 1, **options}).samples(whom))


def texts(whom, *asked, **options):
    return [whom.tokenizer.decode(sample.tokens) for sample in samples(whom, *asked, **options)]
