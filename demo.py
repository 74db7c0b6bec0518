"""Verbs."""

import typer

app = typer.Typer()
