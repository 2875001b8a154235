# moved to gradalign.tasks.storage
from gradalign.tasks.storage import CACHE_VARIABLE as CACHE_VARIABLE
from gradalign.tasks.storage import DATA_VARIABLE as DATA_VARIABLE
from gradalign.tasks.storage import cache_folder as cache_folder
from gradalign.tasks.storage import data_folder as data_folder
from gradalign.tasks.storage import find_file as find_file
from gradalign.tasks.storage import using_data_folder as using_data_folder
