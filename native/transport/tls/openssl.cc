#include "native/transport/tls/openssl.h"

#include <dlfcn.h>

#include <cstring>

namespace sparkvod::openssl {

Result Load(const char* library, Api* api) {
  // Its own symbols before those of the same name that another library brought, and for nobody
  // else. One that Python has loaded already from a folder of its own is found by its name.
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = ::dlerror();
    return Result::Fail(
        Code::kInvalid,
        std::string("SPARKVOD_TLS=1 was found, which needs OpenSSL 3, but ") + library +
            " cannot be loaded (" + (why != nullptr ? why : "no reason was given") +
            "); install it on every host (Debian: libssl3), or set SPARKVOD_TLS=0 on all ranks");
  }
  std::string missing;
  const auto find = [&](const char* name, auto* function) {
    void* const found = ::dlsym(handle, name);  // of what it is linked with too
    if (found == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
    std::memcpy(function, &found, sizeof found);
  };
#define SPARKVOD_OPENSSL_FIND(type, name, arguments) find(#name, &api->name);
  SPARKVOD_OPENSSL_FUNCTIONS(SPARKVOD_OPENSSL_FIND)
#undef SPARKVOD_OPENSSL_FIND
  if (missing.empty()) return {};
  ::dlclose(handle);
  return Result::Fail(Code::kInvalid, std::string("SPARKVOD_TLS=1 needs OpenSSL 3, but ") +
                                          library + " lacks " + missing +
                                          "; install OpenSSL 3.0 or newer on every host");
}

}  // namespace sparkvod::openssl
