# moved to gradalign.recipes
from gradalign.recipes import Recipe as Recipe
from gradalign.recipes import load_recipe as load_recipe
from gradalign.recipes import output_folder as output_folder
from gradalign.recipes import shipped_recipes as shipped_recipes
from gradalign.recipes import unused_changes as unused_changes
