"""CPU back end."""
from .reference import cast_jobs as cast_jobs
