//! Volumes after power cuts: what was reported is there, and of the rest nothing is left.

mod expansion;
mod life;
mod pod;
mod store;
