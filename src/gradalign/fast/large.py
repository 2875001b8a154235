# moved to gradalign.fast.linear
from gradalign.fast.linear import LargeWeight as LargeWeight
from gradalign.fast.linear import large_product as large_product
