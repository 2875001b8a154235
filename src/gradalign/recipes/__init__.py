"""Recipes: experiments as TOML files, checked and built. The files that come with the package lie here too."""
