"""Tools of the repository: what makes pictures, models and pages. Nothing that is installed uses
them."""
