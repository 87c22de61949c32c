"""Deciding: from a profile and options to one kind and one size per KV head (`Policy`)."""
