# moved to gradalign.fast.linear
from gradalign.fast.linear import GradientFactors as GradientFactors
