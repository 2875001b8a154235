"""Many clients at once: cohorts of a small model as batched products, a few clients of a larger one in lockstep.

Which clients go together depends on their order alone, so the bits do not depend on the number of workers. The results
are those of the per-client path up to rounding. What these trainers cannot do takes that path.
"""
