# moved to gradalign.recipes.spec
from gradalign.recipes.spec import TrackingSpec as TrackingSpec
