# moved to gradalign.cli
from gradalign.cli import lost_output as lost_output
from gradalign.cli import output_is_lost as output_is_lost
from gradalign.cli import secure_streams as secure_streams
