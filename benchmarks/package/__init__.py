"""What surrounds the solvers: conversion, estimators, imports, work on several processes."""
