#include "native/transport/inproc/inproc.h"

#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

namespace sparkvod::inproc {
namespace {

constexpr int kInterruptMs = 50;  // how often a wait looks whether it is interrupted

struct Offered {
  bool made = false;
  std::string world;
  std::weak_ptr<Arena> arena;
};

struct Places {
  std::mutex mu;
  std::condition_variable changed;
  std::map<std::string, Offered> by_name;
};

Places& AllPlaces() {
  static Places& places = *new Places;  // never destroyed: engines may outlive static objects
  return places;
}

}  // namespace

Place::Place(std::string name) : name_(std::move(name)) {
  Places& places = AllPlaces();
  const std::lock_guard<std::mutex> lock(places.mu);
  places.by_name[name_];
}

Place::~Place() {
  Places& places = AllPlaces();
  const std::lock_guard<std::mutex> lock(places.mu);
  places.by_name.erase(name_);
  places.changed.notify_all();
}

void Place::Offer(const std::string& world, const std::shared_ptr<Arena>& arena) {
  Places& places = AllPlaces();
  const std::lock_guard<std::mutex> lock(places.mu);
  places.by_name[name_] = {true, world, arena};
  places.changed.notify_all();
}

Result Await(const std::vector<Sought>& sought, const std::string& world, const Deadline& deadline,
             const std::function<bool()>& interrupted, std::vector<std::shared_ptr<Arena>>* out) {
  Places& places = AllPlaces();
  std::unique_lock<std::mutex> lock(places.mu);
  const auto met = [&](const Offered& offered) { return offered.made && offered.world == world; };
  out->clear();
  while (out->size() < sought.size()) {
    const Sought& next = sought[out->size()];
    const auto place = places.by_name.find(next.place);
    std::shared_ptr<Arena> arena;
    const bool there = place != places.by_name.end();
    if (there && met(place->second)) arena = place->second.arena.lock();
    if (!there || (met(place->second) && arena == nullptr))
      return Result::Fail(Code::kPeerLost, next.rank + " left before all had connected");
    if (arena != nullptr) {
      out->push_back(std::move(arena));
      continue;
    }
    if (deadline.Passed()) {
      std::string missing;
      for (size_t i = out->size(); i < sought.size(); ++i) {
        const auto other = places.by_name.find(sought[i].place);
        if (other != places.by_name.end() && met(other->second)) continue;
        const bool came = other != places.by_name.end() && other->second.made;
        missing +=
            (missing.empty() ? "" : "; ") + sought[i].rank +
            (came ? ": it knows another secret, or other endpoints" : ": it has not connected");
      }
      return Result::Fail(Code::kTimeout, missing);
    }
    const auto most = std::chrono::milliseconds(deadline.LeftMs(kInterruptMs));
    if (places.changed.wait_for(lock, most) != std::cv_status::timeout || !interrupted) continue;
    lock.unlock();  // who is asked may take its time
    const bool over = interrupted();
    lock.lock();
    if (over) return Result::Fail(Code::kShutDown, "interrupted while connecting");
  }
  return {};
}

}  // namespace sparkvod::inproc
