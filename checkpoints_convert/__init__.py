"""Offline tools for checkpoints: conversion of published folders, and verification."""
