# moved to gradalign.flower.strategy
from gradalign.flower.strategy import RemoteClients as RemoteClients
