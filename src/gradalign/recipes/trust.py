# moved to gradalign.recipes
from gradalign.recipes import is_outside as is_outside
from gradalign.recipes import lies_in_run_folder as lies_in_run_folder
from gradalign.recipes import require_trust as require_trust
from gradalign.recipes import task_name as task_name
