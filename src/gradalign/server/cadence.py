# moved to gradalign.server.measure
from gradalign.server.measure import FREE as FREE
from gradalign.server.measure import SHARE as SHARE
from gradalign.server.measure import settle as settle
from gradalign.server.measure import spacing as spacing
