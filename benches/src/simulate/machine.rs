//! Simulated machine: devices, and the links and memory that their jobs share.

use std::sync::Arc;

use dovetail::engine::SimulatedDevice;
use dovetail::planner::{Plan, Resource};
use dovetail::topology::{Hop, SharedLinks, Topology};

/// Part of the machine that bytes of several jobs cross at one rate in all.
#[derive(Debug)]
pub struct Pipe {
    pub name: String,
    /// Bytes per second.
    rate: f64,
    /// True if bytes between host memory and a device cross it.
    pub is_of_host: bool,
}

/// Devices of a topology, with what connects them.
#[derive(Debug)]
pub struct Machine {
    pub devices: Vec<Arc<SimulatedDevice>>,
    pub names: Vec<String>,
    pub pipes: Vec<Pipe>,
    /// Pipes of each link: forward, backward, and both directions together if that is limited.
    of_links: Vec<([usize; 2], Option<usize>)>,
    /// Pipe of the memory of each device's socket.
    of_memory: Vec<Option<usize>>,
    links: Arc<SharedLinks>,
}

/// Pipe, and the share of its rate that a job takes while it runs at full speed.
pub type Load = (usize, f64);

impl Machine {
    /// Makes the machine that a topology describes. Its devices are as in
    /// [`SimulatedDevice::all_of`].
    pub fn new(topology: &Topology, speed: f64, memory_bytes: u64) -> Self {
        let mut pipes = Vec::new();
        let mut pipe = |name: String, rate: f64| {
            pipes.push(Pipe { name, rate, is_of_host: false });
            pipes.len() - 1
        };
        let mut of_links = Vec::new();
        for link in &topology.links {
            let [first, second] = &link.between;
            let forward = pipe(format!("{first} to {second}"), link.forward_rate);
            let backward = pipe(format!("{second} to {first}"), link.backward_rate);
            let both = link.total_rate.map(|rate| pipe(format!("{first} and {second}"), rate));
            of_links.push(([forward, backward], both));
        }
        let sockets: Vec<Option<usize>> = topology
            .sockets
            .iter()
            .map(|socket| socket.memory_rate.map(|rate| pipe(format!("memory of {}", socket.name), rate)))
            .collect();
        let memory_of = |node| {
            let own = topology.socket_of(node)?;
            sockets[topology.sockets.iter().position(|socket| socket.name == own.name)?]
        };
        let (nodes, links) = (&topology.devices, Arc::new(SharedLinks::new(topology.clone())));
        let mut machine = Self {
            devices: SimulatedDevice::all_of(&links, speed, memory_bytes),
            names: nodes.iter().map(|node| node.name.clone()).collect(),
            of_memory: nodes.iter().map(memory_of).collect(),
            links,
            of_links,
            pipes,
        };
        machine.mark_pipes_of_host();
        machine
    }

    fn mark_pipes_of_host(&mut self) {
        let routes = (0..self.devices.len()).filter_map(|device| self.links.host_route(device));
        let hops: Vec<Hop> =
            routes.flat_map(|route| route.to_device.iter().chain(&route.from_device)).copied().collect();
        let memory = self.of_memory.iter().flatten().copied();
        for pipe in hops.iter().flat_map(|hop| self.pipes_of(hop)).chain(memory).collect::<Vec<_>>() {
            self.pipes[pipe].is_of_host = true;
        }
    }

    fn pipes_of(&self, hop: &Hop) -> Vec<usize> {
        let (directions, both) = self.of_links[hop.link];
        [directions[usize::from(!hop.forward)]].into_iter().chain(both).collect()
    }

    /// Returns what a job on the given devices takes of each pipe, if it runs for `seconds` without
    /// others.
    pub fn loads(&self, plan: &Plan, devices: &[usize], seconds: f64) -> Vec<Load> {
        let rates = &plan.target.rates;
        let (bytes_in, bytes_out) =
            (plan.demand[Resource::LinkIn] * rates.copy_in, plan.demand[Resource::LinkOut] * rates.copy_out);
        let mut bytes = vec![0.0; self.pipes.len()];
        let mut cross = |hops: &[Hop], moved: f64| {
            hops.iter().flat_map(|hop| self.pipes_of(hop)).for_each(|pipe| bytes[pipe] += moved);
        };
        let others = (devices.len() - 1) as f64;
        for &device in devices {
            if let Some(route) = self.links.host_route(device) {
                cross(&route.to_device, bytes_in);
                cross(&route.from_device, bytes_out);
            }
            for &other in devices.iter().filter(|&&other| other != device) {
                let hops = self.links.hops(device, other).unwrap_or_default();
                cross(hops, plan.sent_bytes as f64 / others);
            }
        }
        devices
            .iter()
            .filter_map(|&device| self.of_memory[device])
            .for_each(|pipe| bytes[pipe] += bytes_in + bytes_out);
        // The prediction counts with the links that the job shares with itself.
        let load = |(pipe, moved): (usize, f64)| (pipe, (moved / (seconds * self.pipes[pipe].rate)).min(1.0));
        bytes.into_iter().enumerate().filter(|(_, moved)| *moved > 0.0).map(load).collect()
    }
}
