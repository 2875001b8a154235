# moved to gradalign.errors
from gradalign.errors import flag as flag
from gradalign.errors import real as real
from gradalign.errors import whole as whole
