"""kvsurgery: rewrite a checkpoint for head-level KV caches, offline.

model --score--> HeadProfile --decide--> Policy --plan--> SurgeryPlan --convert--> checkpoint
"""

__version__ = "0.1.0"
