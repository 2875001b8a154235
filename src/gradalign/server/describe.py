# moved to gradalign.server.federation
from gradalign.server.federation import describe as describe
