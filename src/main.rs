//! walpost
fn main() {}
