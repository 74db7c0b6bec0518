"""From prompts to a faster server, on one GPU: headline.sh has the stages, in order."""
