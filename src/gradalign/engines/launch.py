# moved to gradalign.engines
from gradalign.engines import rank as rank
from gradalign.engines import under_torchrun as under_torchrun
