"""RULER: thirteen synthetic tasks of long context."""

from kvsurgery.evaluate.tasks.ruler.task import RulerTask

TASK = RulerTask
