# moved to gradalign.sweep.plan
from gradalign.sweep.plan import trial_spec as trial_spec
