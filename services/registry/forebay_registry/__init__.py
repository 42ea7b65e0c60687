"""The catalogue of models, versions, aliases and traffic splits."""
