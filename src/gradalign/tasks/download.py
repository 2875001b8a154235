# moved to gradalign.tasks.storage
from gradalign.tasks.storage import ARCHIVES as ARCHIVES
from gradalign.tasks.storage import NO_ARCHIVE as NO_ARCHIVE
from gradalign.tasks.storage import Archive as Archive
from gradalign.tasks.storage import fetch as fetch
