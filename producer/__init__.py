"""Producer: prompt files -> plan in S3 -> hints in Redis."""
